"""Which hosts are there, and which of them a run of some size takes."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .settings import Host, Size

PROBE_SECONDS = 15.0
AT_ONCE = 64


def living(hosts: Sequence[Host], probe: str) -> list[Host]:
    """The hosts for which the command ``probe``, with the name in place of ``{host}``, ends with status 0 in time."""

    def lives(host: Host) -> bool:
        words = [word.replace("{host}", host.name) for word in shlex.split(probe)]
        try:
            done = subprocess.run(
                words, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(hosts)))) as pool:
        return [host for host, there in zip(hosts, pool.map(lives, hosts), strict=True) if there]


def largest(sizes: Sequence[Size], hosts: Sequence[Host]) -> Size | None:
    """The first of ``sizes``, which fall, that the hosts have room for, or None."""
    room = sum(host.slots for host in hosts)
    return next((size for size in sizes if size.ranks <= room), None)


def taken(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """The first hosts with room for ``ranks`` in all; the last one with no more ranks than are needed."""
    found = []
    for host in hosts:
        if ranks > 0:
            found.append(Host(host.name, min(host.slots, ranks)))
            ranks -= host.slots
    return found
