"""What does not fit, and what to change: rules on the facts of all ranks and on the self-test's rows. No MPI here."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Facts = dict[str, Any]

WRONG, ADVICE = "wrong", "advice"
#: bytes of /dev/shm for each rank of a node: a stream's slots, and room for the first gradient buckets
SHARED_BYTES = 64 << 20
#: a self-test between nodes below this share of the network device's own rate is worth a look
LEAST_SHARE = 0.2
#: variables that forbid NCCL a link
FORBIDS = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
CHOOSES_NETWORK = ("UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include", "FI_PROVIDER", "FI_TCP_IFACE")


@dataclass(frozen=True)
class Finding:
    """Something that does not fit.

    level: WRONG, if training would fail or give wrong numbers, or ADVICE. change: what to do about it.
    """

    level: str
    text: str
    change: str


def by_host(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The facts of the ranks of each host, in the order of the ranks."""
    hosts: dict[str, list[Facts]] = defaultdict(list)
    for facts in ranks:
        hosts[facts["host"]].append(facts)
    return dict(hosts)


def cores_of(here: Sequence[Facts]) -> set[int]:
    """The numbers of the cores that the ranks of one host may use; each rank alone where its launcher bound it."""
    return {core for facts in here for core in facts["cores"]}


def findings(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> list[Finding]:
    """All findings, the wrong ones first.

    ranks: `bench.checkup.facts.rank_facts` of each rank, with "node": the least rank that it shares memory with.
    rows: of the self-test.
    """
    rules = (_results, _versions, _threads_of_mpi, _placement, _cores, _memory, _network, _gpus)
    found = [finding for rule in rules for finding in rule(ranks, rows)]
    return sorted(found, key=lambda one: one.level != WRONG)


def _results(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        if row["wrong"]:
            where = "the ranks of a node" if row["group"] == "node" else "all ranks"
            yield Finding(
                WRONG, f"{row['operation']} of {row['bytes']} bytes by {row['transport']} on {where} gave "
                f"{row['wrong']} wrong elements",
                "do not train here: update this MPI and its network library, or take another one",
            )  # fmt: skip


def _versions(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    def text(facts: Facts, name: str) -> str:
        return str(facts["mpi"] if name == "MPI" else facts["versions"].get(name))

    for name in ("MPI", "mpi4py", "torch", "python", "numpy"):
        hosts: dict[str, list[str]] = defaultdict(list)
        for facts in ranks:
            if facts["host"] not in hosts[text(facts, name)]:
                hosts[text(facts, name)].append(facts["host"])
        if len(hosts) > 1:
            each = "; ".join(f"{version} on {_few(names)}" for version, names in hosts.items())
            level = ADVICE if name == "numpy" else WRONG
            yield Finding(level, f"the ranks have different versions of {name}: {each}",
                          "use one environment on a file system that all hosts see")  # fmt: skip


def _threads_of_mpi(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    levels = sorted({facts["thread_level"] for facts in ranks} - {"THREAD_MULTIPLE"})
    if levels:
        yield Finding(
            ADVICE, f"MPI offers {', '.join(levels)} only: a rank that computes cannot answer when a collective times "
            "out, and there is no watcher thread",
            "take an MPI that is built with MPI_THREAD_MULTIPLE, and set mpi4py.rc.thread_level to nothing less",
        )  # fmt: skip


def _placement(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    hosts = by_host(ranks)
    for host, here in hosts.items():
        nodes = {facts["node"] for facts in here}
        if len(nodes) > 1:
            yield Finding(
                ADVICE, f"the {len(here)} ranks of {host} are {len(nodes)} groups that share no memory",
                "start all ranks of a host in one container, or in containers with one /dev/shm (--ipc=host)",
            )  # fmt: skip
    counts = Counter(facts["node"] for facts in ranks)
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{len(here)} on {host}" for host, here in hosts.items())
        yield Finding(
            ADVICE, f"the hosts have different numbers of ranks ({numbers}): collectives of all ranks go by MPI alone",
            "start equally many ranks on each host: srun --ntasks-per-node, mpiexec -ppn, mpirun --map-by ppr:N:node",
        )  # fmt: skip
    order = [facts["node"] for facts in ranks]
    changes = sum(first != second for first, second in pairwise(order))
    if changes >= len(counts) > 1:
        yield Finding(
            ADVICE, "adjacent ranks are on different hosts, and tensor groups are adjacent ranks",
            "place ranks by blocks: srun --distribution=block, mpirun --map-by slot",
        )  # fmt: skip


def _cores(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for host, here in by_host(ranks).items():
        cores, threads = len(cores_of(here)), max(facts["threads"] for facts in here)
        if len(here) > cores:
            yield Finding(
                ADVICE, f"{host} has {cores} core{'s' * (cores > 1)} for {len(here)} ranks: MPI's polling makes small "
                "collectives up to a hundred times slower",
                f"start at most {cores} ranks there",
            )  # fmt: skip
        elif len(here) * threads > cores:
            yield Finding(
                ADVICE, f"the {len(here)} ranks of {host} run {threads} threads each on {cores} cores",
                f"set OMP_NUM_THREADS={max(1, cores // len(here))}",
            )  # fmt: skip


def _memory(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for host, here in by_host(ranks).items():
        shared = here[0]["shared_memory"]
        free = 0 if shared is None else shared["free"]
        if len(here) > 1 and free < SHARED_BYTES * len(here):
            yield Finding(
                ADVICE, f"/dev/shm of {host} has {free >> 20} MB free for {len(here)} ranks: where it is too small, "
                "large tensors go by MPI's messages",
                "give it more: docker --shm-size=8g, mount -o remount,size=8g /dev/shm; or remove what is left there",
            )  # fmt: skip
        limit = here[0]["locked_memory"]
        if here[0]["infiniband"] and limit is not None:
            yield Finding(
                ADVICE, f"processes on {host} may lock {limit >> 10} kB of memory only, which InfiniBand needs more of",
                "ulimit -l unlimited; for Slurm: LimitMEMLOCK=infinity in slurmd's unit",
            )  # fmt: skip


def _network(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    if len({facts["node"] for facts in ranks}) < 2:
        return
    first = ranks[0]
    chosen = [name for name in CHOOSES_NETWORK if name in first["environment"]]
    names = [device["name"] for device in first["networks"]]
    if len(names) > 1 and not chosen:
        yield Finding(
            ADVICE, f"{first['host']} has several network devices ({', '.join(names)}), and none is chosen",
            "if MPI takes the wrong one, set UCX_NET_DEVICES (MPICH), OMPI_MCA_btl_tcp_if_include (Open MPI) or "
            "FI_TCP_IFACE (Intel MPI)",
        )  # fmt: skip
    rates = [float(found[1]) for port in first["infiniband"] if (found := re.match(r"([\d.]+) Gb/sec", port["rate"]))]
    active = [port for port in first["infiniband"] if "ACTIVE" in port["state"]]
    for port in first["infiniband"]:
        if port not in active:
            yield Finding(ADVICE, f"the InfiniBand port {port['name']} of {first['host']} is {port['state']}",
                          "ask for the cable or the subnet manager, if the port should be in use")  # fmt: skip
    fastest = max([*rates, *((device["mbit_per_s"] or 0) / 1000 for device in first["networks"])], default=0)
    between = [row for row in rows if row["group"] == "world" and row["operation"] == "sendrecv"]
    if fastest and between:
        best = 8e-9 * max(row["algbw"] for row in between)
        if best < LEAST_SHARE * fastest:
            yield Finding(
                ADVICE, f"messages between hosts reach {best:.2f} Gbit/s, and the fastest device {fastest:g} Gbit/s",
                "look whether MPI takes that device: UCX_NET_DEVICES and UCX_LOG_LEVEL=info (MPICH), "
                "OMPI_MCA_btl_tcp_if_include and OMPI_MCA_pml_base_verbose=10 (Open MPI), FI_TCP_IFACE, FI_PROVIDER "
                "and I_MPI_DEBUG=4 (Intel MPI)",
            )  # fmt: skip


def _gpus(ranks: Sequence[Facts], rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    for host, here in by_host(ranks).items():
        first = here[0]
        if not any(facts["gpus"] for facts in here):
            continue
        if first["cupy"] is None:
            yield Finding(ADVICE, f"{host} has GPUs, and CuPy is not installed: there is no NCCL for --device cuda",
                          "install the extra gpu or gpu-cuda13")  # fmt: skip
        if first["nccl"] is None:
            yield Finding(ADVICE, f"no libnccl.so.2 is found on {host}", "install the extra gpu or gpu-cuda13")
        seen = max(len(facts["gpus"]) for facts in here)
        if seen < len(here):
            alone = " (each rank sees one, perhaps its own)" if seen == 1 else ""
            yield Finding(
                ADVICE, f"the {len(here)} ranks of {host} see {seen} GPU{'s' * (seen > 1)}{alone}",
                "let each rank see all GPUs of its node: srun --gpus-per-node=N --gpu-bind=none; or start fewer ranks",
            )  # fmt: skip
        if set_here := [name for name in FORBIDS if first["environment"].get(name, "0") != "0"]:
            yield Finding(ADVICE, f"{', '.join(set_here)} forbids NCCL a link on {host}", "unset it")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
