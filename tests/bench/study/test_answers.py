"""bench.study: the order of the sizes, the answers, and the projection to more ranks, against numbers by hand."""

import json
from dataclasses import asdict

import pytest

from bench.collective_study.measurement import Measurement
from bench.collective_study.points import model_of_points
from bench.study import answers, folder, sizes
from bench.study.projection import MeasuredMachine, step_on
from commengine import UsageError
from commengine.cost import FittedModel, Link, Segment
from trainers.settings.commands import GPTSettings


def row(size, transport, spent, *, width=0.01, operation="all_reduce", ranks=2, converged=True):
    return Measurement(
        operation=operation, transport=transport, bytes=size, ranks=ranks, dtype="float32", seconds={"p50": spent},
        ci=(spent * (1 - width), spent * (1 + width)), converged=converged, busbw=size / spent,
    )  # fmt: skip


def test_every_size_comes_once_the_coarse_ones_first():
    found = list(sizes.units(1 << 20))
    of_one = [(size, level) for (operation, size), level in found if operation == "broadcast"]
    assert [size for size, level in of_one if level == 0] == [4, 256, 16 << 10, 1 << 20]
    assert sorted(size for size, _ in of_one) == [4 << k for k in range(19)]
    assert [level for _, level in found] == sorted(level for _, level in found)
    assert len(found) == 6 * len(of_one) == len({unit for unit, _ in found})


def test_a_cells_time_keeps_within_its_bounds():
    assert sizes.cell_seconds(30.0, 100) == pytest.approx(0.2)  # half of a limit more for warm-up and checks
    assert sizes.cell_seconds(-5.0, 100) == 0.02 and sizes.cell_seconds(1e4, 1) == 0.5


def test_a_way_is_the_answer_until_another_is_faster_for_certain():
    rows = [
        row(4, "mpi4py", 1.0e-6), row(4, "engine", 3e-6), row(4, "shared", 3e-6),
        row(1024, "mpi4py", 2.04e-6), row(1024, "shared", 2e-6),  # 2% is no reason
        row(4096, "mpi4py", 4e-6, width=0.5), row(4096, "shared", 3e-6, width=0.5),  # nor what chance may be
        row(1 << 20, "mpi4py", 9e-5), row(1 << 20, "shared", 3e-5), row(1 << 20, "engine", 8e-5),
        row(1 << 24, "mpi4py", 9e-3), row(1 << 24, "engine", 8e-3, converged=False),
    ]  # fmt: skip
    (found,) = answers.by_operation(rows).values()
    assert answers.stretches(found) == [(4, "mpi4py"), (1 << 20, "shared"), (1 << 24, "engine")]
    said = answers.ways(rows)["answer"]
    assert "MPI has no" not in said
    half = [one.but(dtype="bfloat16") for one in rows if one.transport != "mpi4py"]
    assert "-: MPI has no all_reduce of bfloat16." in answers.ways(half)["answer"]
    assert "| all_reduce | plain MPI, window from 1 MB, engine from 16 MB* | plain MPI, engine from 1 MB |" in said
    assert "engine from 1 MB | 3.00x | 1.12x* |" in said
    priced = answers.cost([*rows[:-1], rows[-1].but(disturbed=True)], "One state.")["answer"]
    assert "| 9 ms +-1.0% | 1.86 GB/s |" in priced and "~" not in priced  # the other row counts
    other = [one.but(disturbed=True) if one.bytes == 1 << 24 else one for one in rows]
    priced = answers.cost(other, "One state.")["answer"]
    assert "+-1.0%~* | 2.1 GB/s~*" in priced and " One state. ~: measured in another state only. *:" in priced
    said = answers.ways(other)["answer"]
    assert "| plain MPI, window from 1 MB | plain MPI, engine from 1 MB | 3.00x | - |" in said
    assert "2 of 12 rows count in no comparison (2: measured in another state only)." in said
    priced = answers.cost(rows)["answer"]
    assert "| operation | 4 B | 4 KB | 1 MB | 16 MB | busbw at 16 MB |" in priced  # the nearest to 64 KB is 4 KB
    assert "| 1 us +-1.0% | 3 us +-50.0% | 30 us +-1.0% | 8 ms +-1.0%* | 2.1 GB/s* |" in priced
    assert (
        "*: the time was up before there were 20 calls whose median was known well enough." in priced
        and "*: the" not in answers.cost(rows[:5])["answer"]
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1.6e-6, "1.6 us"), (0.0009994, "999 us"), (0.0009996, "1 ms"), (0.2987, "299 ms"), (12.345, "12.3 s"),
     (1234.5, "1,234 s")],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(seconds, said):
    assert answers.time_label(seconds) == said


def test_points_are_joined_by_lines_and_the_engines_fastest_way_counts():
    rows = [row(100, "engine", 5e-6), row(100, "shared", 6e-6), row(300, "engine", 9e-6), row(300, "shared", 7e-6)]
    points = model_of_points([*rows, row(300, "mpi4py", 1e-6)])
    assert points.seconds("all_reduce", 100, 2) == pytest.approx(5e-6)
    assert points.seconds("all_reduce", 200, 2) == pytest.approx(6e-6)
    assert points.seconds("all_reduce", 500, 2) == pytest.approx(9e-6)  # beyond the last, its line goes on


def test_rows_of_another_state_and_of_few_calls_switch_nothing_and_move_no_model():
    """One way is disturbed at 16 B, and another has three calls there: neither is a reason to leave plain MPI."""
    rows = [
        row(size, way, (1 if way == "mpi4py" else 1.5) * (5e-6 + 1e-9 * size)) for size in (8, 16, 32)
        for way in ("mpi4py", "engine")
    ]  # fmt: skip
    for wrong in ({"disturbed": True}, {"iterations": 3}):
        at_16 = rows[2].but(seconds={"p50": 32e-6}, **wrong)
        slow = [*rows[:2], at_16, *rows[3:]]
        fast = [*rows, row(16, "engine", 1e-6).but(**wrong), row(64, "engine", 1e-6).but(**wrong)]
        for given in (slow, fast):
            (found,) = answers.by_operation(given).values()
            assert answers.stretches(found) == [(8, "mpi4py")]
        assert model_of_points(fast) == model_of_points(rows)
        assert "plain MPI | plain MPI" in answers.ways(slow)["answer"]
    nothing = answers.more(traced(), machine(points=FittedModel({}), model=FittedModel({})), 1 << 20, "")
    assert nothing[0]["answer"].startswith("No answer: this model was not fitted to all_reduce") and nothing[1] == []


def test_a_model_of_points_has_one_dtype_and_one_state_whatever_the_order():
    rows = [row(size, "engine", 5e-6 + 1e-9 * size).but(state="state 1", iterations=90) for size in (8, 1024)]
    others = [one.but(state="state 2", iterations=40, seconds={"p50": 1e-6}) for one in rows]
    others += [one.but(dtype="bfloat16", seconds={"p50": 1e-6}) for one in rows]
    assert model_of_points([*rows, *others]) == model_of_points([*others, *rows]) == model_of_points(rows)


STEP = {
    "vocab_size": 128, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16,
    "micro_batch_size": 3, "make_vocab_size_divisible_by": 128, "tensor_model_parallel_size": 2,
    "ddp_bucket_size": 10**9, "mock_data": True,
}  # fmt: skip


def traced(**other):
    config = GPTSettings(**STEP | other)
    group = {"group": "tensor", "operation": "all_reduce", "ranks": 2, "count": 3, "bytes": 8}
    of_ranks = {"0": {"seconds": [0.03, 0.01, 0.02], "exposed": [0.01, 0.03, 0.02], "skew": [0, 0, 0]}}
    summary = {"step": [[0.1, 0.3, 0.2], [0.2] * 3], "exposed": [[0.05] * 3] * 2, "skew": [[0.01] * 3] * 2}
    return {
        "ranks": 4, "model": "gpt", "config": asdict(config), "parts": [group | {"of_ranks": of_ranks}],
        "seconds": summary, "formulas_hold": True,
    }  # fmt: skip


def machine(**other):
    flat = FittedModel({"all_reduce": (Segment(2, 0, 1e-5, 1e-9),)})
    points = FittedModel({"all_reduce": (Segment(2, 0, 2e-5, 2e-9),)})
    return MeasuredMachine(**{"points": points, "model": flat, "ranks": 4, "several": False,
                              "between": Link(1e-6, 1e-10)} | other)  # fmt: skip


def test_a_collective_on_more_ranks_by_hand():
    """A data group has 2 members a node beside tensor groups of 2; all 4 ranks of a node send at once."""
    size = 1e6
    inside = 2e-5 + 2e-9 * size
    assert machine().seconds("all_reduce", size, 2, tensor=2) == pytest.approx(inside)  # as measured
    nodes, slices, shared = 3, size / 2, 4 * 1e-10  # seconds a byte of a quarter of the adapter
    between = 2 * (nodes - 1) * 1e-6 + 2 * (nodes - 1) / nodes * slices * shared
    assert machine().seconds("all_reduce", size, 6, tensor=2) == pytest.approx(inside + between)
    ring = 5 * 1e-5 + size * 1e-9 * (2 * 5 / 6) / 1  # the fit of 2 ranks, scaled to 6
    assert machine(several=True).seconds("all_reduce", size, 6, tensor=2) == pytest.approx(ring)


def test_a_step_on_more_ranks_by_hand():
    """4 ranks with tensor 2 become 16: the step here stays, with its skew, and what is longer there is added."""
    here = answers.step_here(traced())
    assert here == pytest.approx((0.2, 0.05))
    found = step_on(16, traced(), here, machine())
    parameters = 4 * (2 * (12 * 32**2 / 2 + (7 / 2 + 6) * 32) + 2 * 32 + 128 * 32 / 2 + 16 * 32)  # bytes of a rank
    reduced = [parameters, 16, 8]  # gradients; two counts; the loss
    there, before = (sum(machine().seconds("all_reduce", size, data, 2) for size in reduced) for data in (8, 2))
    assert there > before
    assert found.waiting == pytest.approx(0.05 + there - before, rel=1e-6)
    assert found.seconds == pytest.approx(0.2 - 0.05 + found.waiting)
    assert found.largest == pytest.approx(parameters)
    assert found.tokens_per_second == pytest.approx(8 * 3 * 16 / found.seconds)
    twice = step_on(16, traced(global_batch_size=12), here, machine())  # two micro-batches a replica here and there
    assert twice.tokens_per_second == pytest.approx(8 * 6 * 16 / twice.seconds)
    with pytest.raises(ValueError, match="no whole number of tensor groups"):
        step_on(9, traced(), here, machine())
    answer, numbers = answers.more(traced(), machine(), 1 << 20, "over there")
    assert [one["ranks"] for one in numbers] == [8, 64, 512] and "over there" in answer["answer"]


def test_more_ranks_are_never_faster_than_the_step_here():
    """The ranks here wait far longer than a model without skew tells, and the collectives there still come on top."""
    here = answers.step_here(traced())
    times = [step_on(ranks, traced(), here, machine()).seconds for ranks in (4, 8, 64, 512)]
    assert times[0] == pytest.approx(here[0]) and times == sorted(times) and len(set(times)) == 4
    alone = traced() | {"ranks": 2}  # one replica here reduces nothing
    assert step_on(2, alone, here, machine()).seconds == here[0] < step_on(4, alone, here, machine()).seconds


def test_a_collective_beyond_the_sweep_is_told():
    parameters = round(step_on(16, traced(), answers.step_here(traced()), machine()).largest)
    for largest in (1 << 10, parameters - 1, parameters):
        said = answers.more(traced(), machine(), largest, "")[0]["answer"]
        assert ("**Extrapolated**" in said) == (largest < parameters)


def test_a_size_that_is_the_largest_too_has_one_column():
    rows = [row(1 << k, way, 1e-5) for k in (4, 20) for way in ("mpi4py", "shared")]
    lines = answers.ways(rows)["answer"].splitlines()
    assert lines[0].count("gain at") == 1 and len({line.count("|") for line in lines[:3]}) == 1


def test_the_share_of_a_step():
    calls = [{"group": "tensor", "operation": "all_reduce", "isolated_s": 0.002}] * 3
    said = answers.share(traced(), {"ranks": [calls, calls]}, "a GPT")["answer"]
    # Of the steps, means over the ranks: 150, 250 and 200 ms, with 50 ms of waiting in each: 33%, 20% and 25%.
    assert said.startswith(
        "**25% of a step** (22% to 29%): it takes 200 ms (175 ms to 225 ms), and the ranks wait for collectives for 50 "
        "ms (50 ms to 50 ms) of it; in 10 ms"
    )
    assert "| tensor (2) | all_reduce | 3 | 20 ms | 20 ms (15 ms to 25 ms) | 6 ms | 10.0% (8.3% to 11.0%) |" in said
    assert "| - | 10.0%" in answers.share(traced(), {"ranks": []}, "")["answer"] and "differs" not in said
    assert "over the 3 traced steps" in said and "a GPT." in said
    assert "**The trace differs" in answers.share(traced() | {"formulas_hold": False}, {"ranks": []}, "")["answer"]


def test_a_folder_goes_on_or_says_why_not(tmp_path):
    place = tmp_path / "study"
    record = folder.open_record(place, {"ranks": 2, "step": ["a"]}, overwrite=False)
    record.finished.append("step")
    folder.save(place, record)
    assert folder.open_record(place, {"ranks": 2, "step": ["a"]}, overwrite=False) == record
    with pytest.raises(UsageError, match=r"other settings \(ranks 2, now 4\); give another folder, or --overwrite"):
        folder.open_record(place, {"ranks": 4, "step": ["a"]}, overwrite=False)
    (place / "mine.txt").write_text("kept")
    (place / "study.json").write_text(json.dumps({"kind": "study", "format": 1}))
    with pytest.raises(UsageError, match=r"study\.json is not of this version"):
        folder.open_record(place, {}, overwrite=False)
    (place / "study.json").write_text('{"kind": "stu')
    with pytest.raises(UsageError, match=r"study\.json: not JSON: .*; give --overwrite to begin anew"):
        folder.open_record(place, {}, overwrite=False)
    with pytest.raises(UsageError, match=r"holds mine\.txt, and no study"):
        folder.open_record(place, {}, overwrite=True)
    assert (place / "mine.txt").read_text() == "kept" and not (place / "study.json").exists()
