"""The contest of the emulator without its jobs: what it refuses, what it keeps, and its table."""

import json

import pytest

from bench.contest import __main__ as command
from bench.contest import emulator
from bench.emulator import layouts
from bench.emulator.layouts import NETWORKS, NODES, RANKS_PER_NODE, part_of
from bench.emulator.machine import EmulatedMachine
from bench.emulator.predicting import arguments
from bench.prediction import group_cost
from bench.prediction.layout import stage_chunks
from bench.prediction.options import layout_of
from tests.bench.contest.stand_ins import rows_of
from trainers.settings import derived
from trainers.settings.rules import require_valid

RUNS, PIPELINES = layouts.RUNS["layouts"], layouts.RUNS["pipelines"]
DRAWN = EmulatedMachine.drawn(1, NODES, RANKS_PER_NODE)


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that are asked for; none of them runs."""
    found = []
    monkeypatch.setattr(emulator, "_job", lambda folder, name, machine, task: found.append((name, machine.ranks, task)))
    return found


def trained(seconds):
    steps = [{"seconds": seconds, "waits": [0.25, 0.35]}] * 3
    return {"seconds": seconds, "steps": steps, "date": "2026-11-25T05:00:00"}


def step(folder, run, seconds):
    (folder / f"{run.file}-trained.json").write_text(json.dumps(trained(seconds)))


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        command.main(["emulator", *argv])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    return line.removeprefix("python -m bench.contest emulator: error: ")


def test_the_runs_are_twelve_on_8_to_64_ranks():
    assert len(RUNS) == 12 and len({run.file for run in RUNS}) == 12
    assert {run.ranks for run in RUNS} == {8, 16, 32, 64} and {run.network for run in RUNS} == set(NETWORKS)
    assert len({run.file for run in (*RUNS, *PIPELINES)}) == len(RUNS) + len(PIPELINES)
    for run in (*RUNS, *PIPELINES):
        machine = part_of(DRAWN, run.network, run.ranks)
        assert machine.ranks == run.ranks and machine.speed == DRAWN.speed[: run.ranks]
        config = run.config()
        require_valid(config, run.ranks)
        assert config.tensor_model_parallel_size == run.tensor


def test_the_prediction_is_asked_for_the_layout_that_trains():
    from bench import predict

    for run in (*RUNS, *PIPELINES):
        given = predict.parser().parse_args(arguments("here.yaml", run))
        layout, config = layout_of(given), run.config()
        assert (layout.ranks, layout.tensor) == (run.ranks, config.tensor_model_parallel_size)
        assert (layout.pipeline, stage_chunks(layout, 8)) == (
            config.pipeline_model_parallel_size,
            derived.chunks(config),
        )
        assert layout.batch == derived.batch_size(config, layout.data) and layout.micro_batch == config.micro_batch_size
        assert layout.zero1 == config.use_distributed_optimizer and given.overlap_grad_reduce in (None, True)
        assert bool(given.overlap_grad_reduce) == bool(config.overlap_grad_reduce)
        assert layout.sequence_parallel == config.sequence_parallel
        assert layout.recompute == (config.recompute_granularity or "none")


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_groups_lie_where_the_grid_puts_them(tensor, ranks):
    if ranks % tensor:
        return

    def tensor_group(rank):
        return range(rank - rank % tensor, rank - rank % tensor + tensor)

    def data_group(rank):
        return range(rank % tensor, ranks, tensor)

    for name, group in (("tensor", tensor_group), ("data", data_group)):
        members = [sum(other // 8 == rank // 8 for other in group(rank)) for rank in range(ranks)]
        at_once = len({tuple(group(rank)) for rank in range(8)})
        assert group_cost.place_of(name, tensor, ranks // tensor, 8) == (members[0], at_once)


def test_runs_without_predictions_are_refused(tmp_path, capsys, jobs):
    step(tmp_path, RUNS[3], 1.0)
    line = refused(capsys, "--folder", str(tmp_path))
    assert line == f"--folder {tmp_path}: these runs have no predictions: {RUNS[3].name}; give another folder"
    assert not jobs


@pytest.mark.parametrize("content", [None, "{}", "[]", "x"])
def test_the_folder_of_another_seed_or_version_is_refused(tmp_path, capsys, jobs, content):
    if content is None:
        EmulatedMachine.drawn(2, NODES, RANKS_PER_NODE).save(tmp_path / "machine.json")
    else:
        (tmp_path / "machine.json").write_text(content)
    assert "its results are of another seed or version" in refused(capsys, "--folder", str(tmp_path))


def test_it_goes_on_with_what_is_left_and_reports(tmp_path, capsys, jobs, monkeypatch):
    dated = {run.name: {"seconds": 0.5, "date": "2026-11-25T04:00:00"} for run in RUNS}
    monkeypatch.setattr(emulator, "predict_all", lambda folder, drawn, runs: dated)
    argv = ["--folder", str(tmp_path), "--output", str(tmp_path / "page.md")]
    with pytest.raises(SystemExit):  # the jobs do nothing here
        command.main(["emulator", *argv])
    jobs.clear()
    monkeypatch.setattr(emulator, "predict_all", None)  # they are written once
    for run in RUNS[:-1]:
        step(tmp_path, run, 0.5)
    with pytest.raises(SystemExit):  # the last one's job does nothing here
        command.main(["emulator", *argv])
    assert jobs == [("plain-64", 64, {"train": {RUNS[-1].name: str(tmp_path / f"{RUNS[-1].file}-trained.json")}})]
    step(tmp_path, RUNS[-1], 0.4)
    assert command.main(["emulator", *argv]) == 0
    page = (tmp_path / "page.md").read_text()
    assert f"| {RUNS[-1].name} | 64 | plain | 500.0 | 400.0 | +25.0% |" in page
    assert "mean error 2.1%, largest +25.0%\n" in page
    assert "written at 2026-11-25T04:00:00, and the first run was measured at 2026-11-25T05:00:00" in page


def test_links_of_a_job_inside_one_node_are_not_named():
    found = {run.name: trained(1.0) for run in RUNS}
    case = emulator.compared(found, found, DRAWN, RUNS)
    rows = [line for line in rows_of(case) if line.startswith(("| data", "| tensor"))]
    links = {int(row.split("|")[2]): row.split("|")[3].strip() for row in rows}
    assert len(rows) == 12 and links[8] == "-" and links[64] == "plain"


def test_pipelines_have_their_bubbles_and_the_slow_link_its_ratio():
    """16 ranks x 4 micro-batches: a pass of 4 + 4 - 1 forwards, of which 3 wait."""
    predicted, found = ({run.name: trained(seconds) for run in PIPELINES} for seconds in (1.0, 2.0))
    found[layouts.ACROSS] = trained(6.0)
    case = emulator.compared(predicted, found, DRAWN, PIPELINES)
    assert case.numbers["across over inside"] == [1.0, 3.0]
    (row,) = (line for line in rows_of(case) if line.startswith("| pipeline 4, 4 micro-batches |"))
    assert row.endswith("| 30.0% | 42.9% |")
    (note,) = (line for line in emulator.CONTEST.notes(None, [case]) if layouts.ACROSS in line)
    assert note.endswith("predicted 1.00 times as long, measured 3.00")
