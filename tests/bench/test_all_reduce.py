"""bench.all_reduce: its contestants on real ranks, what it says of them, and options that cannot be."""

import json

import pytest

from bench import all_reduce, fit
from bench.collective_study.results import read
from tests.support import mpirun

MEMORY = {"available": 1 << 33, "shared": 1 << 32}


def bench(ranks, *options):
    return mpirun.run(ranks, "-m", "bench.all_reduce", *map(str, options), timeout=100)


@pytest.mark.slow
def test_every_contestant_is_measured_and_checked(tmp_path):
    files = {name: tmp_path / f"r.{end}" for name, end in (("json", "json"), ("output", "md"), ("plot", "png"))}
    done = bench(
        2, "--min-bytes", "32K", "--max-bytes", "128K", "--rounds", 3, "--turn-seconds", 0.001,
        *(word for name, file in files.items() for word in (f"--{name}", file)),
    )  # fmt: skip
    assert done.returncode == 0, done
    result = json.loads(files["json"].read_text())
    at = {(row["dtype"], row["transport"], row["bytes"]): row for row in result["rows"]}
    sizes = (32768, 65536, 131072)
    both = ["shared", "engine", "gloo", "memory"]
    mine = {"float32": [*both, "mpi4py"], "bfloat16": [*both, "in-fp32"]}
    if not any("mpix-bfloat16" in reason for reason in result["missing"]):
        mine["bfloat16"].append("mpix-bfloat16")
    assert set(at) == {(dtype, name, size) for dtype, names in mine.items() for name in names for size in sizes}
    for (dtype, name, size), row in at.items():
        assert row["wrong"] == 0 and row["count"] == size // (4 if dtype == "float32" else 2)
        low, middle, high = row["turns"]
        assert 0 < row["seconds"]["min"] <= low <= middle <= high <= row["seconds"]["max"]
        assert row["iterations"] >= 3 and row["busbw"] == row["algbw"]  # 2 (p - 1) / p with two ranks
        if name == "shared":
            assert row["speedup"] == [1, 1, 1]
    text = files["output"].read_text()
    assert text == done.stdout
    assert "- command: `python -m bench.all_reduce --min-bytes 32K" in text and "- wrong elements: 0" in text
    assert text.count("| 64 KB |") == 4 and "| size | in window | engine, private tensor | mpi4py's Allreduce |" in text
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    series, _ = read(files["json"])
    assert len(series) == len(mine["float32"]) + len(mine["bfloat16"])
    assert fit.main([str(files["json"]), "--transport", "shared"]) == 0


def rows(ratios):
    """A row of each (baseline, megabytes): its time over that in the window."""
    return [
        {"transport": name, "dtype": "float32", "bytes": size << 20, "speedup": [ratio - 1, ratio, ratio + 1]}
        for (name, size), ratio in ratios.items()
    ]


def test_goals_are_held_to_the_worst_size():
    found = {("mpi4py", 2): 1.0, ("mpi4py", 4): 3.5, ("mpi4py", 64): 3.0, ("gloo", 4): 9.0, ("gloo", 16): 7.9}
    assert list(all_reduce.goals(rows(found))) == [
        "- goal: 3 times as fast as mpi4py, fp32, 4 MB to 64 MB: reached, at least 3.00",
        "- goal: 8 times as fast as gloo, fp32, 4 MB to 16 MB: NOT reached, at least 7.90",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--min-bytes", "x"], "--min-bytes: 'x' is not a size"),
        (["--min-bytes", "2M", "--max-bytes", "1M"], "--min-bytes 2097152 and --max-bytes 1048576"),
        (["--max-bytes", "2G"], "--max-bytes 2G: ten buffers of that size a rank"),
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
def test_one_rank_is_one_clear_error():
    done = bench(1)
    assert done.returncode == 2
    assert done.stderr == (
        "python -m bench.all_reduce: error: an all-reduce needs two ranks or more: start it with mpiexec -n 2\n"
    )
