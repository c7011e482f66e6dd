"""bench.collectives --only overhead: what is subtracted from what, and the statistics of it, beside NumPy's."""

import json

import numpy as np
import pytest


@pytest.mark.mpi(min_size=2)
def test_a_row_is_the_statistics_of_what_was_measured(mpi_world, monkeypatch):
    from bench.collective_study import overhead
    from commengine import Communicator

    measured = []
    original = overhead.mean_seconds

    def noted(call, count, world):
        measured.append((call, count, original(call, count, world)))
        return measured[-1][-1]

    monkeypatch.setattr(overhead, "mean_seconds", noted)
    with Communicator(mpi_world) as world, Communicator(mpi_world) as windows:
        row = overhead.measure(world, windows, 64, rounds=5, seconds=0.1, least=1 << 20)
    calls, counts, seconds = zip(*measured, strict=True)
    names = [overhead.WINDOW, "commengine", "mpi4py"]
    by_call = dict(zip(dict.fromkeys(calls), names, strict=True))  # the first three, one after another, set the count
    times = {name: np.array([1e6 * s for c, s in zip(calls[3:], seconds[3:], strict=True) if by_call[c] == name])
             for name in names}  # fmt: skip
    assert row["bytes"] == 64 and row["rounds"] >= 5 and set(counts[3:]) == {row["calls"]}
    added = times["commengine"] - times["mpi4py"]
    assert len(added) == row["rounds"]
    assert row["commengine"] == pytest.approx(np.median(times["commengine"]))
    expected = np.quantile(added, (0.25, 0.5, 0.75))
    assert [row["added_low"], row["added"], row["added_high"]] == pytest.approx(expected)
    in_window = np.median(times[overhead.WINDOW] - times["mpi4py"])
    assert row["added_window"] == pytest.approx(in_window)
    assert row["alone"] > 0 and row["alone_low"] <= row["alone"] <= row["alone_high"]


@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_command_writes_a_row_for_each_size(mpi_world, tmp_path, monkeypatch, capsys):
    from bench.collective_study import overhead
    from commengine import Communicator

    monkeypatch.setattr(overhead, "SIZES", (8, 1024))
    files = {"output": tmp_path / "a.md", "json": tmp_path / "a.json"}
    argv = [f"--{name}={file}" for name, file in files.items()]
    with Communicator(mpi_world) as world:
        overhead.main(world, ["--rounds", "2", "--seconds", "0.001", *argv])
    if mpi_world.rank == 0:
        rows = json.loads(files["json"].read_text())["rows"]
        assert [row["bytes"] for row in rows] == [8, 1024]
        assert capsys.readouterr().out == files["output"].read_text()
        for row in rows:
            assert f"\n| {row['bytes']:,} | {row['rounds']} x {row['calls']} |" in files["output"].read_text()
