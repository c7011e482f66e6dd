"""bench.gpu: rows are in their files as soon as they are measured, and FLOPs are those of the paper's formula."""

import json

import pytest


def test_a_row_is_in_the_files_when_it_is_added(tmp_path, capsys):
    from bench import gpu
    from bench.gpu_study.rows import RowFile

    table, numbers = tmp_path / "a.md", tmp_path / "a.json"
    given = gpu.parse(["machine", "--tiny", "--output", str(table), "--json", str(numbers)])
    rows = RowFile(given, "Title", ["| a |", "|---|"], ["A line."], seed=3)
    text = table.read_text()
    assert text.startswith("# Title\n\n- command: ") and text.endswith("\n\nA line.\n\n| a |\n|---|\n")
    for number in range(3):
        rows.add([number], {"a": number})
        assert table.read_text().splitlines()[-1] == f"| {number} |"
        assert json.loads(numbers.read_text()) == given.environment | {
            "seed": 3, "rows": [{"a": n} for n in range(number + 1)],
        }  # fmt: skip
    assert capsys.readouterr().out == table.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"a.md", "a.json"}  # nothing half written is left


def test_flops_of_a_step_are_those_of_its_products():
    """Three times the forward products: a backward has two for each."""
    from tplayers import GPTConfig
    from tplayers.formulas import model_flops

    layers, h, s, b, v = 3, 64, 48, 2, 1024
    layer = 2 * b * s * (3 * h * h + h * h + 2 * 4 * h * h) + 2 * 2 * b * s * s * h
    forward = layers * layer + 2 * b * s * h * v
    assert model_flops(GPTConfig(layers, h, 4, v, s).cost_shape(s), b) == pytest.approx(3 * forward)


@pytest.mark.slow
def test_the_machine_is_told_without_secrets(capfd, monkeypatch):
    from bench import gpu

    monkeypatch.setenv("SOME_TOKEN", "sesame")
    monkeypatch.setenv("SOME_NAME", "open")
    assert gpu.main(["machine", "--tiny"]) == 0
    told = capfd.readouterr().out
    assert "SOME_TOKEN=..." in told and "sesame" not in told and "SOME_NAME=open" in told
    assert "\nnumpy " in told and "/dev/shm" in told and "== libraries" in told


@pytest.mark.mpi
def test_speed_of_a_small_model_is_measured(mpi_world):
    from mpi4py import MPI

    from bench.gpu_study.flops import ceiling, model_speed
    from commengine import Communicator
    from tplayers import GPTConfig

    with Communicator(MPI.COMM_SELF, device="cpu") as single:
        config = GPTConfig(1, 32, 2, 128, 16, hidden_dropout=0.0, attention_dropout=0.0)
        assert model_speed(single, config, 2, 16, compiled=False) > 0
        assert ceiling(single.device, 64) > 0


@pytest.mark.mpi
def test_overlap_keeps_the_times_and_the_hidden_share_of_every_round(mpi_world, tmp_path):
    from bench import gpu
    from bench.gpu_study import overlap
    from commengine import Communicator

    file = tmp_path / "a.json"
    given = gpu.parse(["overlap", "--tiny", "--rounds", "3", "--bucket-mb", "1", "--json", str(file)])
    with Communicator(mpi_world, device="cpu") as world:
        overlap.run(world, given)
    if mpi_world.rank == 0:
        rows = json.loads(file.read_text())["rows"]
        ways = ["one stream", "two streams"]
        assert [row["name"] for row in rows] == [*ways, *(f"{way}, with small ones" for way in ways)]
        assert [len(row[key]) for row in rows for key in ("seconds", "hidden")] == [3] * 8


def save_losses(folder, *losses, first=1):
    folder.mkdir(exist_ok=True)
    rows = [{"iteration": step, "lm_loss": loss} for step, loss in enumerate(losses, first)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(tmp_path):
    """A folder of runs that agree, but for those that need NCCL 2.30, which are not there."""
    from bench.gpu_study.losses import COMPARISONS

    for one in COMPARISONS:
        for name in (one.run, one.reference):
            if not one.optional:
                save_losses(tmp_path / name, 6.0, 5.0, 4.0)
    save_losses(tmp_path / "resumed", 5.0, 4.0, first=2)
    return tmp_path


def verdict(runs, capsys, *options):
    from bench import gpu

    status = gpu.main(["losses", "--runs", str(runs), *options])
    return status, capsys.readouterr().out.splitlines()


def test_losses_that_agree_are_a_good_verdict(runs, capsys):
    status, lines = verdict(runs, capsys)
    assert status == 0 and lines[-1] == "verdict: good"
    assert "| resumed | cuda | 2 | 4.0000 | 0 | 0.0002 | agrees |" in lines
    assert any(line.startswith("| tp2_nccl") and line.endswith("| not run |") for line in lines)


@pytest.mark.parametrize(
    ("run", "losses", "word"),
    [
        ("cuda", (6.0, 5.0, 4.001), "DIFFERS"),
        ("bf16", (6.0, 5.03, 4.0), "DIFFERS"),
        ("compiled", (6.0, None, 4.0), "NOT FINITE"),
        ("zero1_staged", (), "MISSING"),
        ("tp2_nccl", (6.0, 5.0, 4.001), "DIFFERS"),
    ],
)
def test_losses_that_do_not_agree_are_a_bad_verdict(runs, capsys, run, losses, word):
    save_losses(runs / run, *losses)
    status, lines = verdict(runs, capsys)
    assert status == 1 and f"{run} {word}" in lines[-1] and lines[-1].startswith("verdict: BAD: ")


def test_a_run_that_was_left_out_on_purpose_is_not_missing(runs, capsys):
    (runs / "compiled" / "metrics.jsonl").unlink()
    assert verdict(runs, capsys)[0] == 1
    assert verdict(runs, capsys, "--without", "compiled")[0] == 0


def test_calls_of_a_step_fit_in_memory_and_are_never_too_few():
    from bench.gpu_study.overhead import calls

    assert [calls(nbytes) for nbytes in (8, 1 << 20, 16 << 20, 256 << 20)] == [500, 500, 128, 10]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: STUDY"),
        (["speed"], "invalid choice: 'speed'"),
        (["overlap", "--rounds", "0"], "--rounds 0: must be at least 1"),
        (["flops", "--tiny", "--output", "/no/where.md"], "--output /no/where.md: there is no folder /no"),
        (["flops", "--tiny", "--models", "9B"], "argument --models: invalid choice: '9B'"),
        (["overhead", "--tiny", "--sizes", "2"], "--sizes 2: must be at least 4"),
        (["losses", "--runs", "/no/where"], "--runs /no/where: there is no such folder"),
        (["losses", "--runs", ".", "--without", "cpus"], "argument --without: invalid choice: 'cpus'"),
    ],
)
def test_bad_options_are_named(argv, message):
    from bench import gpu

    with pytest.raises(ValueError) as raised:
        gpu.parse(argv)
    assert message in str(raised.value)
