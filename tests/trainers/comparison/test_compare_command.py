"""trainers.compare on the runs of pretrain_gpt: equal bits at two layouts, and the first step that differs without."""

import pytest

from trainers.compare import main

pytestmark = pytest.mark.slow

STEPS = ["--train-iters=4", "--save-interval=2", "--lr=0.01"]
SPLIT = "--tensor-model-parallel-size=2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, pretrain, mock):
    """The folders of a run on one rank, of the same run on two, and of an ordinary one."""
    home = tmp_path_factory.mktemp("runs")
    flags = {
        "one rank": (1, ["--deterministic"]),
        "two ranks": (2, ["--deterministic", SPLIT, "--sequence-parallel"]),
        "plain": (2, ["--log-digests", "--log-interval=2", SPLIT]),
    }
    folders = {name: str(home / name) for name in flags}
    ended = pretrain(*((n, [*mock, *STEPS, *words, "--save", folders[name]]) for name, (n, words) in flags.items()))
    assert all(code == 0 for one in ended for code in one.codes), [one.err for one in ended]
    return folders


def test_runs_of_two_layouts(runs, capsys):
    assert main([runs["one rank"], runs["two ranks"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "steps 1 to 4, 4 of them: the loss, the gradient's norm and the weights have the same bits"
    assert "tensor_model_parallel_size 1 and 2" in lines[1]
    assert lines[2] == "checkpoint iter_0000004: all parameters, masters and moments have the same bits"


def test_an_ordinary_run_differs(runs, capsys):
    assert main([runs["one rank"], runs["plain"]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1 is the first that differs (steps 1 to 4, 4 of them are compared): ")
    assert any(line.startswith("  grad_norm: ") for line in lines)
    assert any(line.startswith("checkpoint iter_0000002: ") and "tensors differ" in line for line in lines)
    assert any(line.startswith("  embedding.weight: ") for line in lines)


def test_errors(runs, tmp_path, capsys):
    assert main([runs["plain"], str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/metrics.jsonl: cannot be read")
    assert main([runs["plain"]]) == 2
