"""A run on a blend: by flags or YAML, the same on any layout, resumed as it was and with other weights."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import rewrite_state
from trainers.data.indexed_writer import IndexedDatasetWriter

pytestmark = pytest.mark.slow

STEPS = ["--lr", "1e-2", "--hidden-dropout", "0.1", "--split", "80,20,0", "--vocab-size", "60"]


def dataset(prefix: Path, documents: int, low: int) -> Path:
    """Tokens of 20 ids from ``low`` on, in an order that can be learnt."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for n in range(documents):
            writer.add_document(low + (np.arange(50) * (n % 3 + 1)) % 20)
    return prefix


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    return {name: dataset(folder / name, 20 + n, 20 * n) for n, name in enumerate("abc")}


def blend(sets: dict[str, Path], *words: object) -> list[object]:
    return ["--data-path", *(sets.get(str(word), word) for word in words)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory, pretrain, tiny, sets) -> Path:
    """Runs of 12 steps on a blend, by flags and YAML on several layouts; a half of it; runs on a single source."""
    root = tmp_path_factory.mktemp("runs")
    base = [*tiny, *STEPS, "--eval-iters", "8"]
    path = f"[0.7, {sets['a']}, 0.3, {sets['b']}]"
    (root / "list.yaml").write_text(f"data-path: {path}\n")
    (root / "text.yaml").write_text(f"data-path: {path[1:-1].replace(',', '')}\n")
    ab = blend(sets, 0.7, "a", 0.3, "b")
    runs = {
        "straight": (1, [*base, *ab, "--train-iters", "12"]),
        "two": (2, [*base, "--config", root / "list.yaml", "--train-iters", "12", "--micro-batch-size", "1"]),
        "tensor": (
            2,
            [*base, "--config", root / "text.yaml", "--train-iters", "12", "--tensor-model-parallel-size", "2"],
        ),
        "halves": (1, [*base, *ab, "--train-iters", "12", "--exit-interval", "6"]),
        "one": (1, [*base, *blend(sets, "a"), "--train-iters", "12", "--exit-interval", "6"]),
        "one-straight": (1, [*base, *blend(sets, "a"), "--train-iters", "12"]),
    }
    made = pretrain(*((n, [*words, "--save", root / name]) for name, (n, words) in runs.items()))
    for (_, words), outcome in zip(runs.values(), made, strict=True):
        assert set(outcome.codes) == {75 if "--exit-interval" in words else 0}, outcome.err
    return root


def without_record(folder: Path) -> None:
    """Make the checkpoint one that a version without blends wrote."""
    state = json.loads((folder / "iter_0000006" / "state.json").read_text()) | {"format": 2}
    del state["data"]
    rewrite_state(folder / "iter_0000006", state, listed=False)


def damaged(folder: Path) -> None:
    state = json.loads((folder / "iter_0000006" / "state.json").read_text())
    state["data"]["sources"][0]["consumed"] += 1
    rewrite_state(folder / "iter_0000006", state)


#: what goes on from a run of 6 steps: the run, what is done to it first, and the words of its --data-path
RESUMED: dict[str, tuple[str, Any, list[object]]] = {
    "unchanged": ("halves", None, [3, "b", 7, "a"]),
    "on two ranks": ("halves", None, [0.7, "a", 0.3, "b"]),
    "other weights": ("halves", None, [0.2, "a", 0.3, "b", 0.5, "c"]),
    "taken away": ("halves", None, ["b"]),
    "old": ("one", without_record, ["a"]),
    "old, blended": ("one", without_record, [0.5, "a", 0.5, "c"]),
    "damaged": ("halves", damaged, [0.7, "a", 0.3, "b"]),
}
#: words of --data-path that are refused, and what the one line says
REFUSED: dict[str, tuple[list[object], list[str]]] = {
    "negative": ([-0.7, "a", 0.3, "b"], ["--data-path -0.7", "'-0.7' is not a weight", "such as 0.7 A 0.3 B"]),
    "all 0": ([0, "a", 0, "b"], ["--data-path 0", "all weights are 0"]),
    "no weights": (["a", "b"], ["is not a weight", "valid: PREFIX, or WEIGHT PREFIX"]),
    "no last prefix": ([0.7, "a", 0.3], ["a weight has no prefix"]),
    "no files": ([0.7, "a", 0.3, "nowhere/b"], ["--data-path nowhere/b: nowhere/b.bin does not exist"]),
    "twice": ([0.7, "a", 0.3, "a"], ["is named twice"]),
}


@pytest.fixture(scope="module")
def ended(begun, pretrain, tiny, sets) -> dict[str, Any]:
    commands = {}
    for name, (run, change, words) in RESUMED.items():
        shutil.copytree(begun / run, folder := begun / name)
        if change is not None:
            change(folder)
        layout = ["--micro-batch-size", "2"] if name == "on two ranks" else []
        goes_on = [
            *tiny,
            *STEPS,
            "--eval-iters",
            "8",
            *layout,
            *blend(sets, *words),
            "--load",
            folder,
            "--save",
            folder,
        ]
        commands[name] = (1 + bool(layout), [*goes_on, "--train-iters", "12"])
    for name, (words, _) in REFUSED.items():
        commands[name] = (2, [*tiny, *STEPS, *blend(sets, *words), "--train-iters", "1"])
    return dict(zip(commands, pretrain(*commands.values()), strict=True))


def losses(rows, folder: Path) -> list[float]:
    found = rows(folder)
    assert [row["iteration"] for row in found] == list(range(1, 13))
    return [row["lm_loss"] for row in found]


def consumed(folder: Path, iteration: int = 12) -> dict[str, int]:
    state = json.loads((folder / f"iter_{iteration:07}" / "state.json").read_text())
    return {Path(source["name"]).name: source["consumed"] for source in state["data"]["sources"]}


@pytest.mark.parametrize("name", ["two", "tensor"])
def test_flags_yaml_and_layouts_give_the_same_run(begun, rows, name):
    assert losses(rows, begun / name) == pytest.approx(losses(rows, begun / "straight"), abs=1e-5)


def test_resuming_with_the_same_weights_is_bit_for_bit(begun, ended, rows):
    """Whatever their order and scale; on other ranks but for rounding."""
    assert ended["unchanged"].codes == [0] and "other data" not in ended["unchanged"].err[0]
    assert losses(rows, begun / "unchanged") == losses(rows, begun / "straight")
    for file in ("model.safetensors", "optimizer.safetensors"):
        written = [(begun / name / "iter_0000012" / file).read_bytes() for name in ("straight", "unchanged")]
        assert written[0] == written[1]
    assert losses(rows, begun / "on two ranks") == pytest.approx(losses(rows, begun / "straight"), abs=1e-5)
    assert consumed(begun / "unchanged") == consumed(begun / "straight") == {"a": 67, "b": 29}


def test_other_weights_go_on_from_the_counts(begun, ended):
    assert consumed(begun / "halves", 6) == {"a": 34, "b": 14}
    assert ended["other weights"].codes == [0]
    assert "other data from sample 48 on: " in ended["other weights"].err[0]
    found = Counter(consumed(begun / "other weights"))
    found.subtract(consumed(begun / "halves", 6))
    assert all(abs(found[name] - share * 48) < 2 for name, share in (("a", 0.2), ("b", 0.3), ("c", 0.5)))
    assert consumed(begun / "taken away") == {"a": 34, "b": 14 + 48}


def test_a_checkpoint_of_an_older_version_goes_on(begun, ended, rows):
    assert losses(rows, begun / "old") == losses(rows, begun / "one-straight")
    assert consumed(begun / "old") == {"a": 96}
    assert "other data from sample 48 on: " in ended["old, blended"].err[0]
    assert consumed(begun / "old, blended") == {"a": 48 + 24, "c": 24}


def test_an_evaluation_that_only_a_stop_brought_says_so(begun, rows):
    found = {run: [(row["iteration"], row.get("at_stop")) for row in rows(begun / run, "validation_loss")]
             for run in ("straight", "halves")}  # fmt: skip
    assert found == {"straight": [(12, None)], "halves": [(6, 1)]}


def test_the_report_tells_of_each_source(begun, rows):
    report = json.loads((begun / "straight" / "report.json").read_text())
    a, b = report["sources"]
    assert (a["weight"], a["samples"], b["weight"], b["samples"]) == (0.7, 67, 0.3, 29)
    # 80% of 20 and of 21 documents of 50 tokens, in samples of 16
    assert (a["epochs"], b["epochs"]) == (67 / 49, 29 / 53)
    mean = 0.7 * a["validation_loss"] + 0.3 * b["validation_loss"]
    assert report["validation_loss"] == pytest.approx(mean, rel=1e-12)
    assert a["validation_loss"] != b["validation_loss"] and report["unigram_entropy"] > 2
    (row,) = rows(begun / "straight", "validation_loss")
    assert [row[f"validation_loss/{source['name']}"] for source in (a, b)] == [
        a["validation_loss"], b["validation_loss"],
    ]  # fmt: skip
    text = (begun / "straight" / "report.txt").read_text()
    for source in (a, b):
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [source["name"]]]
        assert line.split()[1:3] == [f"{source['weight']:.4f}", str(source["samples"])]
    one = json.loads((begun / "one-straight" / "report.json").read_text())
    assert one["sources"] == [] and rows(begun / "one-straight", "validation_loss")[0].keys() == {
        "iteration", "validation_loss",
    }  # fmt: skip
    gone = json.loads((begun / "taken away" / "report.json").read_text())["sources"]
    assert [(Path(source["name"]).name, source["weight"]) for source in gone] == [("b", 1.0), ("a", 0.0)]
    assert gone[0]["validation_loss"] is not None and gone[1]["validation_loss"] is None


@pytest.mark.parametrize("name", REFUSED)
def test_bad_blends_are_one_line_on_all_ranks(ended, name):
    outcome = ended[name]
    assert outcome.codes == [2, 2] and outcome.err[1] == "" and "Traceback" not in outcome.err[0]
    (line,) = [line for line in outcome.err[0].splitlines() if line]
    assert line.startswith("error: ") and all(words in line for words in REFUSED[name][1]), line


def test_a_damaged_record_is_one_line(ended):
    assert ended["damaged"].codes == [2]
    (line,) = [line for line in ended["damaged"].err[0].splitlines() if line.startswith("error: ")]
    assert "--load: " in line and "state.json: the record of its data is damaged: it is not one of 48 samples" in line
