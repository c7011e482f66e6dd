"""trainers.compare on the runs of pretrain_gpt: equal bits at two layouts, and the first step that differs without.

The run on two ranks is killed after a checkpoint, and goes on at another layout.
"""

import json
import shutil

import pytest

from tests.support.training.command_job import CommandJob
from trainers.compare import main

pytestmark = pytest.mark.slow

STEPS = ["--train-iters=4", "--save-interval=2", "--lr=0.01"]
SPLIT = "--tensor-model-parallel-size=2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pretrain, mock):
    """The folders of a run on one rank, of the same run on two, and of an ordinary one."""
    home = tmp_path_factory.mktemp("runs")
    folders = {name: str(home / name) for name in ("one rank", "two ranks", "plain")}
    first = [*mock, *STEPS, "--deterministic", "--use-distributed-optimizer", "--save", folders["two ranks"]]
    kill = ["step", 4, 1, "KILL"]  # rank 1, in the fourth step
    job = CommandJob(tmp_path_factory.mktemp("job"), ranks=2)
    with pytest.raises(AssertionError, match=r"the job ended early, with status (?!0:)"):
        job.run([[2, first, "pretrain_gpt", [kill], ""]], 60)
    job.close()
    assert [path.name for path in (home / "two ranks").glob("iter_*")] == ["iter_0000002"]
    flags = {
        "one rank": (1, ["--deterministic"]),
        "two ranks": (2, ["--deterministic", SPLIT, "--sequence-parallel", "--load", folders["two ranks"]]),
        "plain": (2, ["--log-digests", "--log-interval=2", SPLIT]),
    }
    ended = pretrain(*((n, [*mock, *STEPS, *words, "--save", folders[name]]) for name, (n, words) in flags.items()))
    assert all(code == 0 for one in ended for code in one.codes), [one.err for one in ended]
    return folders


def test_runs_of_two_layouts(runs, capsys):
    """The first two steps are those of the killed run, and its third step was done again."""
    assert main([runs["one rank"], runs["two ranks"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "steps 1 to 4, 4 of them: the loss, the gradient's norm and the weights have the same bits"
    assert lines[1].startswith("tensor x data ranks, which may differ")
    assert lines[2:4] == ["  first run: 1 x 1", "  second run: 1 x 2 at steps 1 to 2; 2 x 1 at steps 3 to 4"]
    assert "tensor_model_parallel_size 1 and 1, then 2 (in iter_0000004)" in lines[4]
    assert "use_distributed_optimizer False and True, then False (in iter_0000004)" in lines[4]
    assert lines[5] == "checkpoint iter_0000004: all parameters, masters and moments have the same bits"


def test_an_ordinary_run_differs(runs, capsys):
    assert main([runs["one rank"], runs["plain"]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1 is the first that differs (steps 1 to 4, 4 of them are compared): ")
    assert any(line.startswith("  grad_norm: ") for line in lines)
    assert any(line.startswith("checkpoint iter_0000002: ") and "tensors differ" in line for line in lines)
    assert any(line.startswith("  embedding.weight: ") for line in lines)


def test_runs_with_nothing_in_common(runs, tmp_path, capsys):
    """A longer run is compared as far as the shorter one goes; runs without a common step cannot be compared."""
    for name, kept in (("short", (1, 2)), ("later", (3, 4))):
        shutil.copytree(runs["one rank"], tmp_path / name)
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(row for row in rows if json.loads(row)["iteration"] in kept)
        )
        shutil.rmtree(tmp_path / name / f"iter_000000{6 - kept[1]}")
    assert main([runs["one rank"], str(tmp_path / "short")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "steps 3 to 4, 2 of them, are in the first run only, and are not compared"
    assert lines[-1] == "checkpoint iter_0000002: all parameters, masters and moments have the same bits"
    assert main([str(tmp_path / "short"), str(tmp_path / "later")]) == 2
    assert "no step has digests in both runs" in capsys.readouterr().err


def test_a_changed_file(runs, tmp_path, capsys):
    """The digests of the steps are equal, so the checkpoint's file is at fault, and its checksums know it."""
    changed = tmp_path / "changed"
    shutil.copytree(runs["one rank"], changed)
    path = changed / "iter_0000004" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert main([runs["one rank"], str(changed)]) == 1
    lines = capsys.readouterr().out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("checkpoint "))
    assert lines[at] == "checkpoint iter_0000004: 1 tensor differs, in the order of the model:"
    assert "1 of " in lines[at + 1]
    assert lines[at + 2].startswith(f"{path.parent} changed after it was saved: {path}: damaged: bytes ")
    assert len(lines) == at + 3


def test_runs_without_digests(runs, tmp_path, capsys):
    """Their checkpoints are compared; without a common one nothing is, which is an error."""
    bare, later = tmp_path / "bare", tmp_path / "later"
    for folder, gone in ((bare, 4), (later, 2)):
        shutil.copytree(runs["one rank"], folder)
        shutil.rmtree(folder / f"iter_000000{gone}")
        (folder / "metrics.jsonl").write_text('{"iteration": 1, "lm_loss": 1.0}\n')
    assert main([runs["one rank"], str(bare)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no steps are compared: ") and "has no digests" in lines[0]
    assert lines[-1] == "checkpoint iter_0000002: all parameters, masters and moments have the same bits"
    assert main([str(bare), str(later)]) == 2
    said = capsys.readouterr()
    assert not said.out and "has no digests" in said.err and "nor is a checkpoint of the same step" in said.err


def test_another_model(runs, tmp_path, capsys):
    """The models' parameters are said first, and nothing else is compared."""
    bert = tmp_path / "bert"
    shutil.copytree(runs["one rank"], bert)
    for path in bert.glob("iter_*/state.json"):
        state = json.loads(path.read_text())
        state["parameters"]["mlm_head.bias"] = {"shape": [8], "view": [8], "dim": 0, "count": 1}
        path.write_text(json.dumps(state))
    assert main([runs["one rank"], str(bert)]) == 1
    assert (
        capsys.readouterr().out
        == "the models differ: in the second model only: mlm_head.bias; nothing else is compared\n"
    )


def test_errors(runs, tmp_path, capsys):
    assert main([runs["plain"], str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: give the --save folders of two runs: {tmp_path}/metrics.jsonl: No such file"
    )
    assert main([runs["plain"]]) == 2
