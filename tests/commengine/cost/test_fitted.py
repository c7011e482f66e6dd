"""Models that bench.study --only fit wrote: the pieces of a curve, and damaged files."""

import json

import pytest

from commengine import cost


def segments(*rows):
    keys = ("ranks", "from_bytes", "alpha", "beta")
    return {"format": 1, "collectives": {"all_reduce": [dict(zip(keys, row, strict=True)) for row in rows]}}


def test_fitted_model_is_piecewise(tmp_path):
    data = segments((4, 1000, 5e-6, 1e-9), (2, 0, 1e-6, 1e-9), (4, 0, 2e-6, 4e-9))
    data["how"] = "measured somewhere"
    data["collectives"]["all_reduce"][0]["alpha_interval"] = [4e-6, 6e-6]
    path = tmp_path / "model.json"
    path.write_text(json.dumps(data))
    model = cost.FittedModel.load(path)
    assert model.seconds("all_reduce", 999, 4) == pytest.approx(2e-6 + 999 * 4e-9)
    assert model.seconds("all_reduce", 1000, 4) == pytest.approx(5e-6 + 1000e-9)
    assert model.seconds("all_reduce", 1000, 2) == pytest.approx(1e-6 + 1000e-9)
    assert model.seconds("all_reduce", 1000, 1) == 0
    # 8 ranks, from 4: a ring's steps, and the same bus bandwidth.
    assert model.seconds("all_reduce", 1e6, 8) == pytest.approx(5e-6 * 7 / 3 + 1e-3 * (7 / 4) / (6 / 4))
    assert cost.FittedModel.from_json(model.to_json()) == model


def test_the_windows_of_an_older_model_are_left_out():
    data = segments((2, 0, 2e-6, 1e-9))
    older = data | {"windows": segments((2, 0, 1e-6, 0))["collectives"]}
    assert cost.FittedModel.from_json(older) == cost.FittedModel.from_json(data)


def test_a_line_that_rises_faster_than_the_size_scales_as_bytes_do():
    model = cost.FittedModel.from_json(segments((2, 0, 0, 1e-9), (2, 1000, -1e-6, 2e-9)))
    assert model.seconds("all_reduce", 1e4, 2) == pytest.approx(19e-6)
    assert model.seconds("all_reduce", 1e4, 512) == pytest.approx(19e-6 * 2 * 511 / 512)  # never below 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], 'object with "collectives"'),
        ({"format": 2, "collectives": {}}, "format 2, this version reads 1"),
        ({"collectives": {"allreduce": []}}, "'allreduce': operations are all_reduce"),
        ({"collectives": {"reduce": []}}, "at least one"),
        ({"collectives": {"reduce": [{"ranks": 2}]}}, "has ranks, from_bytes, alpha and beta"),
        (segments((2, 0, -1, 0)), "0 or more"),
        (segments((2, 0, float("nan"), 0)), "0 or more"),
        (segments((2, 0, 1e-6, -1e-9)), "0 or more"),
        (segments((2, 0, 0, 1e-9), (2, 1000, -2e-6, 1e-9)), "all times are 0 or more"),
        (segments((1, 0, 0, 0)), "2 ranks or more"),
        (segments((2, 8, 0, 0)), "start at 0 bytes"),
        (segments((2, 0, 0, 0), (2, 0, 1, 0)), "different sizes"),
    ],
)
def test_damaged_model_is_named(data, message, tmp_path):
    (tmp_path / "model.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"model.json: .*{message}"):
        cost.FittedModel.load(tmp_path / "model.json")


def test_model_not_fitted_to_an_operation_says_so():
    with pytest.raises(ValueError, match="not fitted to broadcast: it has all_reduce"):
        cost.FittedModel.from_json(segments((2, 0, 0, 0))).seconds("broadcast", 1, 2)
