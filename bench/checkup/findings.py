"""What does not fit, and what to change: rules on the facts of all ranks and on the self-test's rows. No MPI here."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.collective_study.measurement import Measurement

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


def findings(ranks: Sequence[Facts], rows: Sequence[Measurement]) -> list[Finding]:
    """All findings, the wrong ones first.

    ranks: `bench.checkup.facts.rank_facts` of each rank, with "node": the least rank that it shares memory with.
    rows: of the self-test.
    """
    advice = [*_of_job(ranks), *_network(ranks, rows)]
    for host, here in by_host(ranks).items():
        advice += [*_of_host(host, here), *(_gpus(host, here) if any(facts["gpus"] for facts in here) else ())]
    found = [*_results(rows), *_versions(ranks), *(Finding(ADVICE, text, change) for text, change in advice)]
    return sorted(found, key=lambda one: one.level != WRONG)


def _results(rows: Sequence[Measurement]) -> Iterator[Finding]:
    for row in rows:
        if row.wrong:
            where = "the ranks of a node" if row.group == "node" else "all ranks"
            text = f"{row.operation} of {row.bytes} bytes by {row.transport} on {where}"
            change = "do not train here: update this MPI and its network library, or take another one"
            yield Finding(WRONG, f"{text} gave {row.wrong} wrong elements", change)


def _versions(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for name in ("MPI", "mpi4py", "torch", "python", "numpy"):
        hosts: dict[str, dict[str, None]] = defaultdict(dict)
        for facts in ranks:
            hosts[str(facts["mpi"] if name == "MPI" else facts["versions"].get(name))][facts["host"]] = None
        if len(hosts) > 1:
            each = "; ".join(f"{version} on {_few([*names])}" for version, names in hosts.items())
            text = f"the ranks have different versions of {name}: {each}"
            level = ADVICE if name == "numpy" else WRONG
            yield Finding(level, text, "use one environment on a file system that all hosts see")


#: what does not fit, and what to change
Advice = Iterator[tuple[str, str]]


def _of_job(ranks: Sequence[Facts]) -> Advice:
    if levels := sorted({facts["thread_level"] for facts in ranks} - {"THREAD_MULTIPLE"}):
        yield (
            f"MPI offers {', '.join(levels)} only: a rank that computes cannot answer when a collective times out, and "
            "there is no watcher thread",
            "take an MPI that is built with MPI_THREAD_MULTIPLE, and set mpi4py.rc.thread_level to nothing less",
        )
    order = [facts["node"] for facts in ranks]
    counts = Counter(order)
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{len(here)} on {host}" for host, here in by_host(ranks).items())
        yield (
            f"the hosts have different numbers of ranks ({numbers}): collectives of all ranks go by MPI alone",
            "start equally many ranks on each host: srun --ntasks-per-node, mpiexec -ppn, mpirun --map-by ppr:N:node",
        )
    if sum(first != second for first, second in pairwise(order)) >= len(counts) > 1:
        yield (
            "adjacent ranks are on different hosts, and tensor groups are adjacent ranks",
            "place ranks by blocks: srun --distribution=block, mpirun --map-by slot",
        )


def _of_host(host: str, here: Sequence[Facts]) -> Advice:
    nodes = {facts["node"] for facts in here}
    if len(nodes) > 1:
        yield (
            f"the {len(here)} ranks of {host} are {len(nodes)} groups that share no memory",
            "start all ranks of a host in one container, or in containers with one /dev/shm (--ipc=host)",
        )
    cores, threads = len(cores_of(here)), max(facts["threads"] for facts in here)
    if len(here) > cores:
        yield (
            f"{host} has {cores} core{'s' * (cores > 1)} for {len(here)} ranks: MPI's polling makes small collectives "
            "up to a hundred times slower",
            f"start at most {cores} ranks there",
        )
    elif len(here) * threads > cores:
        yield (
            f"the {len(here)} ranks of {host} run {threads} threads each on {cores} cores",
            f"set OMP_NUM_THREADS={max(1, cores // len(here))}",
        )
    free = (here[0]["shared_memory"] or {"free": 0})["free"]
    if len(here) > 1 and free < SHARED_BYTES * len(here):
        yield (
            f"/dev/shm of {host} has {free >> 20} MB free for {len(here)} ranks: where it is too small, large tensors "
            "go by MPI's messages",
            "give it more: docker --shm-size=8g, mount -o remount,size=8g /dev/shm; or remove what is left there",
        )
    limit = here[0]["locked_memory"]
    if here[0]["infiniband"] and limit is not None:
        yield (
            f"processes on {host} may lock {limit >> 10} kB of memory only, which InfiniBand needs more of",
            "ulimit -l unlimited; for Slurm: LimitMEMLOCK=infinity in slurmd's unit",
        )


def _network(ranks: Sequence[Facts], rows: Sequence[Measurement]) -> Advice:
    if len({facts["node"] for facts in ranks}) < 2:
        return
    first = ranks[0]
    names = [device["name"] for device in first["networks"]]
    if len(names) > 1 and not any(name in first["environment"] for name in CHOOSES_NETWORK):
        yield (
            f"{first['host']} has several network devices ({', '.join(names)}), and none is chosen",
            "if MPI takes the wrong one, set UCX_NET_DEVICES (MPICH), OMPI_MCA_btl_tcp_if_include (Open MPI) or "
            "FI_TCP_IFACE (Intel MPI)",
        )
    for port in first["infiniband"]:
        if "ACTIVE" not in port["state"]:
            yield (
                f"the InfiniBand port {port['name']} of {first['host']} is {port['state']}",
                "ask for the cable or the subnet manager, if the port should be in use",
            )
    rates = [float(found[1]) for port in first["infiniband"] if (found := re.match(r"([\d.]+) Gb/sec", port["rate"]))]
    fastest = max([*rates, *((device["mbit_per_s"] or 0) / 1000 for device in first["networks"])], default=0)
    between = [8e-9 * (row.algbw or 0) for row in rows if (row.group, row.operation) == ("world", "sendrecv")]
    if fastest and between and max(between) < LEAST_SHARE * fastest:
        yield (
            f"messages between hosts reach {max(between):.2f} Gbit/s, and the fastest device {fastest:g} Gbit/s",
            "look whether MPI takes that device: UCX_NET_DEVICES and UCX_LOG_LEVEL=info (MPICH), "
            "OMPI_MCA_btl_tcp_if_include and OMPI_MCA_pml_base_verbose=10 (Open MPI), FI_TCP_IFACE, FI_PROVIDER "
            "and I_MPI_DEBUG=4 (Intel MPI)",
        )


def _gpus(host: str, here: Sequence[Facts]) -> Advice:
    first = here[0]
    if first["cupy"] is None:
        yield (
            f"{host} has GPUs, and CuPy is not installed: there is no NCCL for --device cuda",
            "install the extra gpu or gpu-cuda13",
        )
    if first["nccl"] is None:
        yield f"no libnccl.so.2 is found on {host}", "install the extra gpu or gpu-cuda13"
    seen = max(len(facts["gpus"]) for facts in here)
    if seen < len(here):
        alone = " (each rank sees one, perhaps its own)" if seen == 1 else ""
        yield (
            f"the {len(here)} ranks of {host} see {seen} GPU{'s' * (seen > 1)}{alone}",
            "let each rank see all GPUs of its node: srun --gpus-per-node=N --gpu-bind=none; or start fewer ranks",
        )
    if set_here := [name for name in FORBIDS if first["environment"].get(name, "0") != "0"]:
        yield f"{', '.join(set_here)} forbids NCCL a link on {host}", "unset it"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
