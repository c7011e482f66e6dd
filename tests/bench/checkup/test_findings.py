"""The doctor's rules, each on the facts of a healthy job with one change."""

import copy
import json
import sys

import pytest

from bench.checkup.findings import ADVICE, WRONG, findings
from bench.collective_study.results import measurements
from tests.support import mpirun

DEVICE = {"name": "eth0", "mbit_per_s": 10000}
GPU = "NVIDIA H100 80GB HBM3 (79.1 GiB)"
ROW = {"group": "world", "ranks": 4, "operation": "sendrecv", "transport": "engine", "bytes": 4 << 20, "wrong": 0,
       "seconds": {"p50": 1e-3}}  # fmt: skip


@pytest.fixture(scope="module")
def healthy():
    """The facts of four ranks on two hosts."""
    facts = {
        "launcher": "srun", "mpi": "MPICH Version: 5.0.2", "mpi_standard": "5.0", "thread_level": "THREAD_MULTIPLE",
        "versions": {"python": "3.11", "torch": "2.13", "mpi4py": "4.1", "numpy": "2"}, "cores": [0, 1, 2, 3],
        "threads": 2,
        "shared_memory": {"bytes": 8 << 30, "free": 8 << 30}, "locked_memory": None, "networks": [DEVICE],
        "infiniband": [], "gpus": [], "cuda_of_torch": None, "nccl": None, "cupy": None, "environment": {},
    }  # fmt: skip
    return [facts | {"rank": rank, "host": f"n{rank // 2}", "node": rank // 2 * 2} for rank in range(4)]


def texts(ranks, rows=()):
    return [f"{one.level}: {one.text} -> {one.change}" for one in findings(ranks, measurements(rows))]


@pytest.mark.slow
def test_the_keys_are_those_that_a_rank_tells(healthy):
    code = "from bench.checkup.facts import rank_facts; import json; print(json.dumps(rank_facts()))"
    done = mpirun.command([sys.executable, "-c", code], timeout=60, fresh=False)
    assert set(json.loads(done.stdout)) | {"node"} == set(healthy[0])


def test_a_healthy_job_has_no_findings(healthy):
    assert texts(healthy, [ROW | {"algbw": 1e9}]) == []


CHANGES = {
    "wrong results": ({}, {}, [ROW | {"algbw": 1e9, "wrong": 3}], WRONG, "gave 3 wrong elements"),
    "another torch": ({3: {"versions": {"torch": "2.12"}}}, {}, [], WRONG, "different versions of torch: 2.13 on n0"),
    "another MPI": ({2: {"mpi": "Open MPI v5"}, 3: {"mpi": "Open MPI v5"}}, {}, [], WRONG, "versions of MPI: MPICH"),
    "thread level": ({}, {"thread_level": "THREAD_SERIALIZED"}, [], ADVICE, "THREAD_SERIALIZED only"),
    "no memory in common": ({1: {"node": 1}}, {}, [], ADVICE, "2 ranks of n0 are 2 groups that share no memory"),
    "uneven": ({2: {"host": "n0", "node": 0}}, {}, [], ADVICE, "different numbers of ranks (3 on n0, 1 on n1)"),
    "round robin": (
        {1: {"host": "n1", "node": 2}, 2: {"host": "n0", "node": 0}}, {}, [], ADVICE, "--distribution=block",
    ),
    "few cores": ({}, {"cores": [0], "threads": 1}, [], ADVICE, "n0 has 1 core for 2 ranks"),
    "many threads of bound ranks": (
        {0: {"cores": [0]}, 1: {"cores": [1]}}, {}, [], ADVICE, "2 ranks of n0 run 2 threads each on 2 cores",
    ),
    "many threads": ({}, {"threads": 4}, [], ADVICE, "set OMP_NUM_THREADS=2"),
    "little shared memory": ({}, {"shared_memory": {"bytes": 64 << 20, "free": 60 << 20}}, [], ADVICE, "60 MB free"),
    "no shared memory": ({}, {"shared_memory": None}, [], ADVICE, "0 MB free for 2 ranks"),
    "networks": ({}, {"networks": [DEVICE, DEVICE | {"name": "eth1"}]}, [], ADVICE, "(eth0, eth1), and none is chosen"),
    "slow network": ({}, {}, [ROW | {"algbw": 1e8}], ADVICE, "reach 0.80 Gbit/s, and the fastest device 10 Gbit/s"),
    "port down": (
        {}, {"infiniband": [{"name": "mlx5_0:1", "state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)"}]}, [], ADVICE,
        "mlx5_0:1 of n0 is 1: DOWN",
    ),
    "locked memory": (
        {}, {"infiniband": [{"name": "mlx5_0:1", "state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)"}],
             "locked_memory": 65536}, [], ADVICE, "lock 64 kB of memory only",
    ),
    "no CuPy": ({}, {"gpus": [GPU, GPU], "nccl": "2.28.9"}, [], ADVICE, "CuPy is not installed"),
    "one GPU each": ({}, {"gpus": [GPU], "nccl": "2.28.9", "cupy": "13"}, [], ADVICE, "see 1 GPU (each rank sees one"),
    "a forbidden link": (
        {}, {"gpus": [GPU, GPU], "nccl": "2.28.9", "cupy": "13", "environment": {"NCCL_P2P_DISABLE": "1"}}, [], ADVICE,
        "NCCL_P2P_DISABLE forbids NCCL a link",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("of_ranks", "of_all", "rows", "level", "words"), CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_is_found(healthy, of_ranks, of_all, rows, level, words):
    ranks = copy.deepcopy(healthy)
    for facts in ranks:
        facts |= of_all
    for rank, change in of_ranks.items():
        ranks[rank] |= {name: ranks[rank][name] | value if isinstance(value, dict) else value
                        for name, value in change.items()}  # fmt: skip
    found = [text for text in texts(ranks, rows) if words in text]
    assert found and all(text.startswith(f"{level}: ") for text in found), texts(ranks, rows)


@pytest.mark.parametrize(("name", "value"), [("UCX_NET_DEVICES", "eth0"), ("OMPI_MCA_btl_tcp_if_include", "eth0")])
def test_a_chosen_network_is_left_alone(healthy, name, value):
    ranks = [facts | {"networks": [DEVICE, DEVICE], "environment": {name: value}} for facts in healthy]
    assert texts(ranks) == []
