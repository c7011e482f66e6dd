"""bench.doctor: alone and on several ranks, its page, its JSON, its errors."""

import json
import re

import pytest

from bench import doctor
from bench.checkup.facts import launcher, networks
from tests.support import mpirun

pytestmark = pytest.mark.slow

#: the transports that every machine has, and the operations and sizes that the self-test runs
TRANSPORTS = {"engine", "mpi4py", "shared", "stream"}
CALLS = {("all_reduce", 8), ("all_reduce", 8 << 20), ("sendrecv", 4 << 20)}


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def ran(request, tmp_path_factory):
    """(ranks, the run, what it wrote as JSON, its page)."""
    folder = tmp_path_factory.mktemp("doctor")
    words = ["--seconds", "0.5", "--json", str(folder / "d.json"), "--output", str(folder / "d.md")]
    done = mpirun.run(request.param, "-m", "bench.doctor", *words, timeout=60)
    assert done.returncode == 0, done
    return request.param, done, json.loads((folder / "d.json").read_text()), (folder / "d.md").read_text()


def test_every_transport_is_run_and_right_or_the_reason_is_told(ran):
    ranks, _, result, _ = ran
    there = TRANSPORTS - ({"shared"} if ranks == 1 else set())
    assert {(row["transport"], row["operation"], row["bytes"]) for row in result["rows"]} == {
        (name, *call) for name in there for call in CALLS
    }
    assert all(row["wrong"] == 0 and row["algbw"] > 0 for row in result["rows"])
    skipped = {one["transport"]: one["reason"] for one in result["skipped"]}
    assert set(skipped) == {"nccl", "staged"} | (TRANSPORTS - there) and all(skipped.values())


def test_the_page_says_what_the_json_says(ran):
    ranks, done, result, page = ran
    assert done.stdout == page
    facts = result["rank_facts"]
    assert [one["rank"] for one in facts] == list(range(ranks)) and {one["node"] for one in facts} == {0}
    first, cores = facts[0], {core for one in facts for core in one["cores"]}
    assert f"| {first['host']} | {ranks} | {len(cores)} | 1 |" in page
    assert f"| MPI | {first['mpi']} (" in page and f"| ranks | {ranks} on 1 host |" in page
    assert first["thread_level"] == "THREAD_MULTIPLE" and first["versions"]["torch"]
    row = rf"\| a node's ranks \| {ranks} \| sendrecv \| engine \| 4 MB(?: \| [\d.]+){{2}} \| right \|"
    assert re.search(row, page)
    assert [f"| {one['level']} | {one['text']} |" in page for one in result["findings"]] == [True] * len(
        result["findings"]
    )


def test_the_launcher_is_named(ran):
    from mpi4py import MPI

    _, _, result, _ = ran
    first = result["rank_facts"][0]
    name = first["launcher"]
    assert name == {
        "MPICH": "MPICH's mpiexec (hydra)", "Intel MPI": "Intel MPI's mpiexec (hydra)", "Open MPI": "Open MPI's mpirun",
    }[MPI.get_vendor()[0]]  # fmt: skip
    assert not [variable for variable in first["environment"] if "I_MPI_INFO" in variable]


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "none: this process was started alone"),
        ({"SLURM_JOB_ID": "7"}, "none: this process was started alone"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "PMI_FD": "11"},
            "srun (job 7, step 0, pmi2)",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "PMIX_RANK": "1",
             "OMPI_COMM_WORLD_SIZE": "2"},
            "srun (job 7, step 0, pmix)",
        ),
        ({"SLURM_JOB_ID": "7", "MPI_LOCALNRANKS": "2"}, "MPICH's mpiexec (hydra), inside Slurm job 7"),
        ({"MPI_LOCALNRANKS": "2", "I_MPI_HYDRA_UUID": "3a2f"}, "Intel MPI's mpiexec (hydra)"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}, "Open MPI's mpirun, inside Slurm job 7"),
        ({"PALS_RANKID": "0"}, "Cray PALS"),
    ],
)  # fmt: skip
def test_the_launcher_is_known_from_its_variables(environ, name):
    assert launcher(environ) == name


def test_devices_that_are_up_are_told(tmp_path):
    for name, flags, speed in (("lo", "0x9", ""), ("eth0", "0x1003", "25000"), ("eth1", "0x1002", "1000"),
                               ("veth", "0x1003", "-1")):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text(f"{flags}\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    assert networks(tmp_path) == [{"name": "eth0", "mbit_per_s": 25000}, {"name": "veth", "mbit_per_s": None}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "-1"], "--seconds -1"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--seconds", "1e9"], "--seconds"),
        (["--json", "/no/where.json"], "--json /no/where.json: there is no folder"),
    ],
)
def test_wrong_options_are_named(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        doctor.parser().parse_args(words)
