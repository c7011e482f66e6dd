"""Faults in files, in one line that names the place."""

import pytest
from pydantic import Field

from commengine import UsageError
from commengine.files.reading import InputFileError, fault_in
from commengine.files.schema import FilePart, checked


class Inner(FilePart):
    size: int = Field(ge=1)
    pair: tuple[float, float] = (0.0, 1.0)


class Outer(FilePart):
    inner: Inner
    many: list[Inner] = Field(default_factory=list)


def test_a_file_that_fits():
    found = checked(Outer, {"inner": {"size": 2, "pair": [1, 2.5]}, "many": [{"size": 1}]})
    assert found.inner.pair == (1.0, 2.5) and found.many[0].pair == (0.0, 1.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "inner is missing"),
        ({"inner": {}}, "inner.size is missing"),
        ({"inner": {"size": "2"}}, "inner.size='2': should be a valid integer"),
        ({"inner": {"size": True}}, "inner.size=True: should be a valid integer"),
        ({"inner": {"size": 0}}, "inner.size=0: should be greater than or equal to 1"),
        ({"inner": {"size": 1, "more": 1}}, "unknown: inner.more"),
        ({"inner": {"size": 1}, "many": [{"size": 1}, {}]}, r"many\[1\].size is missing"),
        ({"inner": {"size": 1, "pair": [1, float("nan")]}}, r"inner.pair\[1\]=nan: should be a finite number"),
        ([], "should be an object"),
    ],
)
def test_the_first_fault_is_named(data, message):
    with pytest.raises(ValueError, match=f"^{message}$|^{message}"):
        checked(Outer, data)


def test_errors_begin_with_their_place_unless_they_have_one():
    with pytest.raises(UsageError, match=r"^a.json: row 3: 'bytes' is missing$"), fault_in("a.json: row 3"):
        {}["bytes"]
    with pytest.raises(UsageError, match=r"^later: ab$"), fault_in(lambda: "later", 2):
        raise TypeError("abc")
    for error in (UsageError("b.json: bad"), InputFileError("b.json: bad")):
        with pytest.raises(type(error), match=r"^b.json: bad$"), fault_in("a.json"):
            raise error
