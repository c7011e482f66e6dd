"""bench.all_reduce: its contestants on real ranks, what it says of them, and options that cannot be."""

import contextlib
import json

import pytest

from bench import all_reduce, fit
from bench.collective_study.piecewise import LEAST_SIZES
from bench.collective_study.ratios import goals
from bench.collective_study.results import read
from tests.support import mpirun

MEMORY = {"available": 1 << 33, "shared": 1 << 32}


def bench(ranks, *options):
    return mpirun.run(ranks, "-m", "bench.all_reduce", *map(str, options), timeout=100)


def key_of(row):
    return row["dtype"], row["transport"], row["bytes"]


@pytest.mark.slow
def test_every_contestant_is_measured_and_checked(tmp_path):
    files = {name: tmp_path / f"r.{end}" for name, end in (("json", "json"), ("output", "md"), ("plot", "png"))}
    done = bench(
        2, "--min-bytes", "32K", "--max-bytes", "128K", "--rounds", 3, "--turn-seconds", 0.001,
        *(word for name, file in files.items() for word in (f"--{name}", file)),
    )  # fmt: skip
    assert done.returncode == 0, done
    result = json.loads(files["json"].read_text())
    at = {key_of(row): row for row in result["rows"]}
    sizes = (32768, 65536, 131072)
    both = ["shared", "engine", "beside-windows", "gloo", "memory"]
    mine = {"float32": [*both, "mpi4py"], "bfloat16": [*both, "in-fp32"]}
    if not any("mpix-bfloat16" in reason for reason in result["missing"]):
        mine["bfloat16"].append("mpix-bfloat16")
    assert set(at) == {(dtype, name, size) for dtype, names in mine.items() for name in names for size in sizes}
    for (dtype, name, size), row in at.items():
        assert row["wrong"] == 0 and row["count"] == size // (4 if dtype == "float32" else 2)
        low, middle, high = row["turns"]
        assert 0 < row["seconds"]["min"] <= low <= middle <= high <= row["seconds"]["max"]
        assert row["iterations"] >= 1 and row["busbw"] == row["algbw"]  # 2 (p - 1) / p with two ranks
        if name == "shared":
            assert row["speedup"] == [1, 1, 1]
        assert row["state"] is None or row["state"].startswith("state ")
    text = files["output"].read_text()
    assert text == done.stdout
    assert "- command: `python -m bench.all_reduce --min-bytes 32K" in text and "- wrong elements: 0" in text
    assert "- states of the machine: " in text
    assert (
        text.count("| 64 KB |") >= 4 and "| size | in window | private | private, group has windows | mpi4py |" in text
    )
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    series, _ = read(files["json"])
    assert {(one.key["dtype"], one.key["transport"]) for one in series} == {key[:2] for key in at}
    sizes_of = [len(set(one.sizes)) for one in series if one.key["transport"] == "shared"]
    # A machine with several states may have fewer sizes in each of them than a line needs.
    with contextlib.nullcontext() if max(sizes_of) >= LEAST_SIZES else pytest.raises(SystemExit):
        assert fit.main([str(files["json"]), "--transport", "shared"]) == 0


def rows(operation, **times):
    """Rows of fp32: for each transport, microseconds by bytes."""
    return [
        {"operation": operation, "transport": name.replace("_", "-"), "dtype": "float32", "bytes": size,
         "turns": [0, 1e-6 * spent, 1]}
        for name, by_size in times.items()
        for size, spent in by_size.items()
    ]  # fmt: skip


def test_goals_are_held_to_the_worst_size():
    theirs = {8: 1.0, 1 << 20: 100.0, 4 << 20: 400.0, 64 << 20: 9000.0}
    found = rows(
        "all_reduce", mpi4py=theirs, shared={1 << 20: 50.0, 4 << 20: 210.0, 64 << 20: 9000.0},
        engine={8: 3.9, 1 << 20: 107.0}, beside_windows={8: 4.1, 1 << 20: 109.0, 4 << 20: 300.0},
    )  # fmt: skip
    assert list(goals(found, slower=False)) == [
        "- goal: private, fp32, at most 3 us or 8% over mpi4py: reached",
        "- goal: private, group has windows, fp32, at most 3 us or 8% over mpi4py: NOT reached at 8 B +3.1 us, +310%; "
        "1 MB +9.0 us, +9%",
        "- goal: in windows 1.8 times as fast as mpi4py, fp32, 1 MB to 16 MB: reached, at least 1.90",
    ]
    assert list(goals(found, slower=True))[-1].endswith("4 times as fast as mpi4py, fp32, 1 MB to 16 MB: NOT reached, "
                                                        "at least 1.90")  # fmt: skip
    assert not [line for line in goals([row | {"operation": "broadcast"} for row in found], False) if "window " in line]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--min-bytes", "x"], "--min-bytes: 'x' is not a size"),
        (["--min-bytes", "2M", "--max-bytes", "1M"], "--min-bytes 2097152 and --max-bytes 1048576"),
        (["--max-bytes", "2G"], "--max-bytes 2G: 20 buffers of that size a rank"),
        (["--dtypes", "fp32"], "--dtypes fp32: there is no such name; valid: float32, bfloat16"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--turn-seconds", "nan"], "--turn-seconds nan: must be a number above 0"),
        (["--output", "/no/where.md"], "--output /no/where.md: there is no folder /no"),
        (["--output", "/tmp"], "--output /tmp: is a folder"),
        (["--plot", "x.txt"], "--plot x.txt: the name ends in .png, .svg or .pdf"),
    ],
)
def test_bad_options_are_named(argv, message):
    with pytest.raises(ValueError) as raised:
        all_reduce.parse(argv, MEMORY)
    assert message in str(raised.value)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather", "broadcast"])
def test_other_operations(operation, tmp_path):
    """From 1 byte on: every contestant that has the operation, and no wrong element."""
    done = bench(
        2, "--operation", operation, "--max-bytes", "64", "--rounds", 3, "--turn-seconds", 0.001,
        "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert done.returncode == 0, done
    found = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {row["operation"] for row in found} == {operation} and not any(row["wrong"] for row in found)
    fp32 = {row["transport"] for row in found if row["dtype"] == "float32"}
    assert fp32 >= {"shared", "engine", "beside-windows", "mpi4py"} and "memory" not in fp32
    assert ("in-fp32" in {row["transport"] for row in found}) == (operation == "reduce_scatter")


@pytest.mark.slow
def test_one_rank_is_one_clear_error():
    done = bench(1)
    assert done.returncode == 2
    assert done.stderr == (
        "python -m bench.all_reduce: error: an all-reduce needs two ranks or more: start it with mpiexec -n 2\n"
    )
