"""Measure what three mechanisms gain on emulated slow links: the table of bench/results/slow_links.md.

    python -m tests.support.lab.slow_links --output bench/results/slow_links.md

For each link, two emulated hosts run ``bench.contest mechanisms``: with one rank on each (halo and bucket overlap), and
with two (two levels). The first row is this machine without a link. The results of each job are a file of the folder,
and a job that has its file does not run again. It needs what `tests.support.lab.hosts.why_not` says.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.command.machine import environment, heading
from bench.timing.turns import Spread, ratio
from tests.support import mpirun
from tests.support.lab.hosts import Hosts, emulated_hosts, why_not

COMMAND = "tests.support.lab.slow_links"
#: microseconds one way, and Mbit/s, of the emulated wires; UCX and TCP add some 60 us to a message
LINKS = ((50, 1000), (200, 500), (1000, 200))
#: (ranks on each host, mechanisms) of the two jobs of a link
JOBS = ((1, ("halo_overlap", "bucket_overlap")), (2, ("two_levels",)))
LIMIT_S = 1200
#: a mechanism is worth its code from this gain on
WORTH = 1.03


def cpu_seconds(pid: int) -> float:
    """The processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(hosts: Hosts | None, ranks: int, words: list[str]) -> "subprocess.CompletedProcess[str]":
    """A job on the hosts, or on this machine."""
    if hosts is None:
        return mpirun.run(max(2, ranks), *words, timeout=LIMIT_S)
    return hosts.run(*words, timeout=LIMIT_S, ranks_each=ranks)


def measure(name: str, hosts: Hosts | None, ranks: int, mechanisms: tuple[str, ...], folder: Path, rounds: int) -> None:
    """One job, into its file."""
    path = folder / f"{name}-{ranks}.json"
    if path.exists():
        return
    print(f"{name}, {ranks} on each host: {', '.join(mechanisms)}", file=sys.stderr, flush=True)
    words = ["-m", "bench.contest", "mechanisms", "--mechanisms", *mechanisms]
    words += ["--rounds", str(rounds), "--json", f"{path}.part"]
    before, began = cpu_seconds(hosts.relay) if hosts else 0.0, time.monotonic()
    done = run(hosts, ranks, words)
    share = (cpu_seconds(hosts.relay) - before) / (time.monotonic() - began) if hosts else 0.0
    if done.returncode:
        raise SystemExit(f"{COMMAND}: {name}: status {done.returncode}: {done.stderr[-2000:]}")
    part = Path(f"{path}.part")
    part.write_text(json.dumps(json.loads(part.read_text()) | {"relay_share": share}, indent=1))
    part.rename(path)


def page(folder: Path, names: list[str]) -> list[str]:
    """The table: a row for each mechanism on each link."""
    lines = [
        "| mechanism | link | ranks | relay's share of a core | ms with | ms without | gain |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    verdicts = []
    for ranks, mechanisms in JOBS:
        for mechanism in mechanisms:
            gains = []
            for name in names:
                data = json.loads((folder / f"{name}-{ranks}.json").read_text())
                (case,) = [one for one in data["cases"] if one["labels"]["mechanism"] == mechanism]
                times = {row["name"]: row["seconds"] for row in case["rows"]}
                gain = ratio(times["without"], times["with"])
                if gain.median >= WORTH and gain.low > 1:
                    where = "without one" if name == "none" else f"on the link {name}"
                    gains.append(f"{gain.median - 1:.0%} {where}")
                both = [f"{Spread.of(times[which]).median * 1e3:.0f}" for which in ("with", "without")]
                wrong = " **the losses differ**" if case["errors"] else ""
                lines.append(
                    f"| {mechanism} | {name} | {data['ranks']} | {data['relay_share']:.0%} | {both[0]} "
                    f"| {both[1]} | {gain.text()}{wrong} |"
                )
            verdicts.append(f"- {mechanism}: gains {', '.join(gains) or f'less than {WORTH - 1:.0%} on every link'}.")
    return [*lines, "", f"Gains of at least {WORTH - 1:.0%} whose lower quartile is a gain, too:", "", *verdicts]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(prog=f"python -m {COMMAND}", description=__doc__, allow_abbrev=False)
    options.add_argument("--folder", type=Path, default=Path("runs/slow_links"), metavar="FOLDER")
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--output", type=Path, metavar="FILE", help="write the table as markdown")
    return options


def main() -> None:
    """Measure what is missing, and print the page."""
    given = parser().parse_args()
    if (reason := why_not()) is not None:
        raise SystemExit(f"{COMMAND}: this machine cannot emulate hosts: {reason}")
    given.folder.mkdir(parents=True, exist_ok=True)
    surroundings = environment(COMMAND)
    names = ["none"]
    for ranks, mechanisms in JOBS:
        measure("none", None, ranks, mechanisms, given.folder, given.rounds)
    for delay_us, rate_mbit in LINKS:
        names.append(f"{delay_us} us, {rate_mbit} Mbit")
        with emulated_hosts(2, delay_us, rate_mbit) as hosts:
            for ranks, mechanisms in JOBS:
                measure(names[-1], hosts, ranks, mechanisms, given.folder, given.rounds)
    lines = page(given.folder, names)
    print("\n".join(lines))
    if given.output:
        about = [
            f"- {given.rounds} rounds in which the two steps of a row alternate, on two emulated hosts; [quartiles]",
            "- 4 ranks have 2 cores here, so their steps vary more; the relay of the packets needs a part of a core",
        ]
        given.output.write_text("\n".join([*heading("Slow links", surroundings), *about, "", *lines, ""]))


if __name__ == "__main__":
    main()
