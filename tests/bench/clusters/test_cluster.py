"""The user's own machine: bench.this_machine writes the file that --cluster this-machine reads."""

import json
import os

import pytest

from bench import predict, this_machine
from bench.clusters import cluster
from commengine import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test has a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(*argv):
    """The cluster that the command of the error message writes."""
    *_, option, file = cluster.OWN_COMMAND.split()
    assert this_machine.main([option, file, *argv]) == 0
    return cluster.load(cluster.OWN)


def test_the_error_names_the_command_that_makes_the_file(capsys):
    with pytest.raises(
        UsageError, match=r"^--cluster this-machine: there is no this-machine.yaml in this folder; make"
    ):
        cluster.load(cluster.OWN)
    found = written()
    assert (
        "its links are not measured" in found.name and found.machine.inside == cluster.load("amd-epyc").machine.inside
    )
    assert found.machine.ranks_per_node == len(os.sched_getaffinity(0))
    assert 1e9 < found.device.peak_flops < 1e13 and 1e8 < found.device.memory_bandwidth < 1e13
    assert predict.main(["--cluster", cluster.OWN, "--model", "355m", "--gpus", "2"]) == 0
    assert "its links are not measured" in capsys.readouterr().out


def test_measured_links(folder, capsys):
    """4 ranks send 2 x 3/4 of the bytes each: 96 of 64 MB, in 10 ms."""
    rows = [{"bytes": 8, "commengine": 4.5}, {"bytes": 64_000_000, "commengine": 10_000.0}]
    (folder / "overhead.json").write_text(json.dumps({"ranks": 4, "rows": rows}))
    found = written("--overhead", "overhead.json")
    assert "not measured" not in found.name
    assert (found.base, 1 / found.machine.inside.beta) == pytest.approx((4.5e-6, 9.6e9))


@pytest.mark.parametrize("content", ["[]", '{"ranks": 2, "rows": []}', '{"ranks": 1, "rows": [{"bytes": 8}]}', "{"])
def test_other_results_give_no_links(content, folder, capsys):
    (folder / "overhead.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        this_machine.main(["--overhead", "overhead.json"])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("python -m bench.this_machine: error: --overhead overhead.json")
