"""The models, layouts and settings of two runs."""

import json

import pytest

from commengine import UsageError
from trainers.comparison.steps import layouts, unlike_models, unlike_settings

GPT = ("embedding.weight", "layers.0.norm.weight", "final_norm.weight")


def checkpoint(folder, iteration, settings=None, names=GPT):
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    placed = {name: {"shape": [4], "view": [4], "dim": None, "count": 1} for name in names}
    state = {"format": 4, "iteration": iteration, "settings": settings or {}, "parameters": placed}
    (path / "state.json").write_text(json.dumps(state))
    return path


def row(iteration, tensor=None, data=None):
    known = {} if tensor is None else {"tensor_model_parallel_size": tensor, "data_parallel_size": data}
    return {"iteration": iteration} | known


def test_the_layouts_of_all_starts():
    """A start on other ranks begins a new span; an older version did not write the layout."""
    assert layouts([row(1, 2, 1), row(2, 2, 1)]) == "2 x 1"
    assert layouts([row(1), row(2)]) == "not known"
    rows = [row(1), row(2, 1, 2), row(3, 1, 2), row(4, 2, 2), row(6, 1, 2)]
    told = ["not known at step 1", "1 x 2 at steps 2 to 3", "2 x 2 at step 4", "1 x 2 at step 6"]
    assert layouts(rows) == "; ".join(told)


def test_the_parameters_of_models(tmp_path):
    """Equal names are one model, whatever its sizes, which are settings."""
    gpt, same = checkpoint(tmp_path / "gpt", 1), checkpoint(tmp_path / "same", 1)
    bert = checkpoint(tmp_path / "bert", 1, names=(*GPT, "mlm_head.bias"))
    task = checkpoint(tmp_path / "task", 1, names=(*GPT, "classifier.weight"))
    assert unlike_models(gpt, same) == ""
    assert unlike_models(gpt, bert) == "in the second model only: mlm_head.bias"
    assert unlike_models(task, bert) == (
        "in the first model only: classifier.weight; in the second model only: mlm_head.bias"
    )
    deep = checkpoint(tmp_path / "deep", 1, names=(*GPT, "layers.1.norm.bias", "layers.1.norm.weight"))
    assert unlike_models(deep, gpt) == "in the first model only: layers.1.norm.bias, layers.1.norm.weight"
    untied = checkpoint(tmp_path / "untied", 1, names=(*GPT, "output.weight"))
    assert unlike_models(gpt, untied) == "in the second model only: output.weight"
    (gpt / "state.json").write_text("{}")
    with pytest.raises(UsageError, match=r"state.json is damaged"):
        unlike_models(gpt, bert)


def test_settings_of_all_starts(tmp_path):
    """The values of each start count, not the last ones; names of folders and unknown settings do not."""
    one, other = tmp_path / "one", tmp_path / "other"
    for iteration, size in ((2, 1), (4, 1), (6, 2), (8, 1)):
        checkpoint(one, iteration, {"lr": 0.1, "size": size, "save": "a", "new": 3})
    for iteration in (2, 4):
        checkpoint(other, iteration, {"lr": 0.2, "size": 1, "save": "b"})
    assert unlike_settings(one, other) == [
        "lr 0.1 and 0.2", "size 1, then 2 (in iter_0000006), then 1 (in iter_0000008) and 1",
    ]  # fmt: skip
    assert unlike_settings(one, one) == []
