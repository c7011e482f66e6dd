"""The page that bench.doctor prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.checkup.findings import Facts, Finding, by_host, cores_of
from bench.command.machine import heading


def page(result: dict[str, Any], found: Sequence[Finding]) -> str:
    """The page in markdown. result: what the command writes as JSON. found: its findings."""
    ranks: list[Facts] = result["rank_facts"]
    lines = heading("Doctor", result)
    lines += ["", *_job(ranks), "", *_hosts(ranks), "", *_transports(result), "", *_findings(found)]
    return "\n".join(lines) + "\n"


def _job(ranks: Sequence[Facts]) -> list[str]:
    first = ranks[0]
    variables = ", ".join("=".join(pair) for pair in first["environment"].items()) or "none"
    return [
        "| the job | |",
        "|---|---|",
        f"| MPI | {first['mpi']} (MPI {first['mpi_standard']}) |",
        f"| mpi4py | {first['versions'].get('mpi4py')} |",
        f"| launcher | {first['launcher']} |",
        f"| thread level | {first['thread_level']} |",
        f"| ranks | {len(ranks)} on {_plural(len(by_host(ranks)), 'host')} |",
        f"| CUDA of torch; CuPy; NCCL | {first['cuda_of_torch'] or 'none'}; {first['cupy'] or 'none'}; "
        f"{first['nccl'] or 'none'} |",
        f"| variables of rank 0 | {variables} |",
    ]


def _hosts(ranks: Sequence[Facts]) -> list[str]:
    lines = [
        "| host | ranks | cores | threads a rank | /dev/shm free | network devices | InfiniBand | GPUs |",
        "|---|---:|---:|---:|---:|---|---|---|",
    ]
    for host, here in by_host(ranks).items():
        first = here[0]
        shared = first["shared_memory"]
        networks = ", ".join(
            device["name"] + (f" {device['mbit_per_s'] / 1000:g} Gbit/s" if device["mbit_per_s"] else "")
            for device in first["networks"]
        )
        ports = ", ".join(f"{port['name']} {port['rate']}" for port in first["infiniband"])
        counted: Counter[str] = Counter(first["gpus"])
        gpus = ", ".join(f"{count} x {gpu}" for gpu, count in counted.items())
        cells = (
            host, len(here), len(cores_of(here)), first["threads"],
            "none" if shared is None else f"{shared['free'] / 2**30:.1f} GB", networks or "none", ports or "none",
            gpus or "none",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _transports(result: dict[str, Any]) -> list[str]:
    if not result["rows"] and not result["skipped"]:
        return ["The self-test was left out (--seconds 0)."]
    lines = [
        f"Self-test, {result['self_test_s']:.1f} s (MB is 2^20 bytes; bandwidth: bytes of a rank's buffer a second):",
        "",
        "| among | ranks | operation | transport | bytes | time, us | GB/s | results |",
        "|---|---:|---|---|---:|---:|---:|---|",
    ]
    for row in sorted(result["rows"], key=lambda row: (row["group"], row["operation"], row["bytes"])):
        size = f"{row['bytes'] >> 20} MB" if row["bytes"] >= 1 << 20 else f"{row['bytes']} B"
        moves = row["bytes"] >= 1 << 20 and (row["ranks"] > 1 or row["operation"] == "sendrecv")
        bandwidth = f"{row['algbw'] / 1e9:.2f}" if moves else ""
        verdict = f"{row['wrong']} WRONG" if row["wrong"] else "right"
        among = "a node's ranks" if row["group"] == "node" else "all ranks"
        lines.append(
            f"| {among} | {row['ranks']} | {row['operation']} | {row['transport']} | {size} | "
            f"{1e6 * row['seconds']['p50']:.1f} | {bandwidth} | {verdict} |"
        )
    reasons = Counter(
        f"{one['transport']} among {'a node' if one['group'] == 'node' else 'all ranks'}: {one['reason']}"
        for one in result["skipped"]
    )
    return [*lines, *(["", "Not run:", "", *(f"- {reason}" for reason in reasons)] if reasons else [])]


def _findings(found: Sequence[Finding]) -> list[str]:
    if not found:
        return ["Nothing was found that does not fit."]
    lines = ["| | what does not fit | what to change |", "|---|---|---|"]
    return [*lines, *(f"| {one.level} | {one.text} | {one.change} |" for one in found)]


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
