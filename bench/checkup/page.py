"""The page that bench.doctor prints. It needs no package but torch, numpy and mpi4py, as all of the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bench.checkup.findings import Finding, by_host, cores_of
from bench.command.machine import heading


def page(result: dict[str, Any], found: Sequence[Finding]) -> str:
    """The page in markdown. result: what the command writes as JSON. found: its findings."""
    return "\n".join([*heading("Doctor", result), "", *_job(result), "", *_hosts(result), "", *_self_test(result),
                      *_findings(found), ""])  # fmt: skip


def _job(result: dict[str, Any]) -> Iterator[str]:
    first, hosts = result["rank_facts"][0], by_host(result["rank_facts"])
    versions = "; ".join(first[name] or "none" for name in ("cuda_of_torch", "cupy", "nccl"))
    rows = {
        "MPI": f"{first['mpi']} (MPI {first['mpi_standard']})",
        "mpi4py": first["versions"]["mpi4py"],
        "launcher": first["launcher"],
        "thread level": first["thread_level"],
        "ranks": f"{len(result['rank_facts'])} on {len(hosts)} host{'s' if len(hosts) != 1 else ''}",
        "CUDA of torch; CuPy; NCCL": versions,
        "variables of rank 0": _list(f"{name}={value}" for name, value in first["environment"].items()),
    }
    yield from ("| the job | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()))


def _hosts(result: dict[str, Any]) -> Iterator[str]:
    yield "| host | ranks | cores | threads a rank | /dev/shm free | network devices | InfiniBand | GPUs |"
    yield "|---|---:|---:|---:|---:|---|---|---|"
    for host, here in by_host(result["rank_facts"]).items():
        one = here[0]
        free = f"{one['shared_memory']['free'] / 2**30:.1f} GB" if one["shared_memory"] else "none"
        devices = _list(
            device["name"] + (f" {device['mbit_per_s'] / 1000:g} Gbit/s" if device["mbit_per_s"] else "")
            for device in one["networks"]
        )
        ports = _list(f"{port['name']} {port['rate']}" for port in one["infiniband"])
        gpus = _list(f"{count} x {gpu}" for gpu, count in Counter[str](one["gpus"]).items())
        cells = (host, len(here), len(cores_of(here)), one["threads"], free, devices, ports, gpus)
        yield f"| {' | '.join(map(str, cells))} |"


def _list(found: Iterator[str]) -> str:
    return ", ".join(found) or "none"


def _self_test(result: dict[str, Any]) -> Iterator[str]:
    if not (result["rows"] or result["skipped"]):
        yield from ("The self-test was left out (--seconds 0).", "")
        return
    yield f"Self-test, {result['self_test_s']:.1f} s (MB is 2^20 bytes; bandwidth: bytes of a rank's buffer a second):"
    yield from ("", "| among | ranks | operation | transport | bytes | time, us | GB/s | results |")
    yield "|---|---:|---|---|---:|---:|---:|---|"
    for row in sorted(result["rows"], key=lambda row: (row["group"], row["operation"], row["bytes"])):
        large, several = row["bytes"] >= 2**20, row["ranks"] > 1 or row["operation"] == "sendrecv"
        cells = (
            "a node's ranks" if row["group"] == "node" else "all ranks", row["ranks"], row["operation"],
            row["transport"], f"{row['bytes'] // 2**20} MB" if large else f"{row['bytes']} B",
            f"{1e6 * row['seconds']['p50']:.1f}", f"{row['algbw'] / 1e9:.2f}" if large and several else "",
            f"{row['wrong']} WRONG" if row["wrong"] else "right",
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    skipped = {(one["group"], one["transport"], one["reason"]): one for one in result["skipped"]}  # each once
    if skipped:
        yield from ("Not run:", "")
        for group, transport, reason in skipped:
            yield f"- {transport} among {'a node' if group == 'node' else 'all ranks'}: {reason}"
        yield ""


def _findings(found: Sequence[Finding]) -> Iterator[str]:
    if not found:
        yield "Nothing was found that does not fit."
        return
    yield from ("| | what does not fit | what to change |", "|---|---|---|")
    yield from (f"| {one.level} | {one.text} | {one.change} |" for one in found)
