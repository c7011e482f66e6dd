"""Files of others are read as data, and a file that is no data is refused without executing anything in it."""

import argparse
import pickle
import random

import numpy as np
import pytest
import torch

from commengine.files.reading import InputFileError
from trainers.weights.tensor_files import Unread, load_pickled


class Hostile:
    """Pickles as a call that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


class OfNumpy:
    """Pickles as a call of a function of numpy that would read a file."""

    def __reduce__(self):
        return np.fromfile, ("/dev/zero",)


@pytest.mark.parametrize("new", [True, False])
def test_tensors_settings_and_states_of_others(tmp_path, new):
    saved = {
        "args": argparse.Namespace(heads=3, dtype=torch.bfloat16), "weight": torch.arange(6.0).view(2, 3),
        "numpy": np.random.RandomState(0).get_state(), "python": random.Random(0).getstate(),
    }  # fmt: skip
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    found = load_pickled(tmp_path / "x.pt")
    assert vars(found["args"]) == {"heads": 3, "dtype": torch.bfloat16}
    assert torch.equal(found["weight"], saved["weight"]) and found["python"] == saved["python"]
    assert isinstance(found["numpy"][1], Unread)
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("new", [True, False])
def test_code_is_refused_by_name_and_not_executed(tmp_path, new):
    made = tmp_path / "made"
    torch.save({"model": Hostile(made)}, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(InputFileError, match=r"x\.pt: refused, because it asks for (builtins\.|_?io\.)?open, which"):
        load_pickled(tmp_path / "x.pt")
    assert not made.exists()
    pickle.loads(pickle.dumps(Hostile(made))).close()  # noqa: S301 it would have run
    assert made.exists()


def test_functions_of_numpy_are_not_called(tmp_path):
    torch.save({"model": OfNumpy()}, tmp_path / "x.pt")
    assert isinstance(load_pickled(tmp_path / "x.pt")["model"], Unread)


@pytest.mark.parametrize("new", [True, False])
def test_a_file_that_is_cut_is_named(tmp_path, new):
    path = tmp_path / "x.pt"
    torch.save({"weight": torch.zeros(1000), "other": torch.ones(10)}, path, _use_new_zipfile_serialization=new)
    raw = path.read_bytes()
    for size in [0, 3, 30, 200, len(raw) // 2, len(raw) - 30]:
        path.write_bytes(raw[:size])
        with pytest.raises(InputFileError, match=r"x\.pt: damaged, cut, or no file of torch\.save: ") as error:
            load_pickled(path)
        assert "\n" not in str(error.value)


def test_what_is_no_file_of_torch_is_named(tmp_path):
    with pytest.raises(InputFileError, match="is a folder"):
        load_pickled(tmp_path)
    (tmp_path / "x.pt").write_text("weights")
    with pytest.raises(InputFileError, match="damaged, cut, or no file"):
        load_pickled(tmp_path / "x.pt")
