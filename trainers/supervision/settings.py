"""The options of `trainers.supervise`; which hosts are there, and which of them a run of some size takes."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from commengine.options.declared import option, require, require_ranges
from commengine.options.ranges import SECONDS, Count, ValidRange, between

#: a count that may be 0, and seconds that may be 0
NONE_OR_MORE = between(0, 10**6)
_SIZE = re.compile(r"([1-9]\d{0,6})(?::([1-9]\d{0,6}))?")
_HOST = re.compile(r"([^\s:,]+)(?::([1-9]\d{0,6}))?")


def _asks_a_host(probe: str) -> bool:
    with contextlib.suppress(ValueError):  # a quotation that does not end
        return any("{host}" in word for word in shlex.split(probe))
    return False


PROBE = ValidRange(_asks_a_host, "must be a command with {host}, which stands for the host's name")


class Size(NamedTuple):
    """A number of ranks, and the tensor size that ``{tensor}`` stands for; None: the command's own."""

    ranks: int
    tensor: int | None = None


@dataclass(frozen=True)
class SuperviseSettings:
    """The options of `trainers.supervise`; a field is the flag of the same name, with dashes."""

    ranks: str | None = option(
        None,
        "numbers of ranks, the preferred one first, such as 4,2: {ranks} in the command is the first one that the "
        "hosts can take; 4:4,2:2 also gives {tensor}, a tensor size for each (default: the command as it is)",
    )
    hosts: str | None = option(
        None,
        "hosts and their ranks, such as n1:2,n2:2: {hosts} in the command is the list of those in use, in this form",
    )
    probe: Annotated[str, PROBE] = option(
        "ssh -o BatchMode=yes -o ConnectTimeout=5 {host} true",
        "command that tells whether a host of --hosts is there, by status 0; asked before each start",
    )
    restarts: Annotated[int, NONE_OR_MORE] = option(100, "restarts before it gives up")
    repeats: Count = option(
        3, "crashes in a row at the same step after which it gives up; before the first step, without "
        "--hosts: after which it takes the next number of --ranks",
    )  # fmt: skip
    back_off: Annotated[float, NONE_OR_MORE] = option(
        1.0, "seconds before the first restart; doubled with each crash that follows without a newer checkpoint"
    )
    longest_back_off: Annotated[float, NONE_OR_MORE] = option(300.0, "the longest wait before a restart, in seconds")
    start_minutes: Annotated[float, SECONDS] = option(
        30.0, "a start that has not begun a step after this time is ended, and counts as a crash"
    )

    def validate(self) -> None:
        """Raise UsageError, naming the option and what is valid, unless all options can be used."""
        require_ranges(self)
        sizes, hosts = self.sizes(), self.host_slots()
        for size in sizes:
            fits = size.tensor is None or size.ranks % size.tensor == 0
            require(fits, f"--ranks {self.ranks}: the tensor size {size.tensor} does not divide {size.ranks} ranks")
        falls = all(one.ranks > other.ranks for one, other in itertools.pairwise(sizes))
        alike = len({size.tensor is None for size in sizes}) < 2
        require(falls and alike, f"--ranks {self.ranks}: must fall, all with a tensor size or none, as 4,2 or 4:4,2:2")
        if hosts:
            require(sizes, f"--hosts {self.hosts}: needs --ranks, the numbers of ranks that may be started")
            room = sum(hosts.values())
            require(
                sizes[0].ranks <= room, f"--ranks {self.ranks}: the hosts of --hosts {self.hosts} take {room} ranks"
            )

    def sizes(self) -> list[Size]:
        """The numbers of ``--ranks``; empty without it. Raises UsageError where they cannot be read."""
        words = [] if self.ranks is None else self.ranks.split(",")
        found = [_SIZE.fullmatch(word.strip()) for word in words]
        require(all(found), f"--ranks {self.ranks}: must be numbers such as 4,2, or with tensor sizes 4:4,2:2")
        return [Size(int(one[1]), int(one[2]) if one[2] else None) for one in found if one]

    def host_slots(self) -> dict[str, int]:
        """How many ranks each host of ``--hosts`` takes; empty without it. Raises UsageError if they cannot be read."""
        words = [] if self.hosts is None else self.hosts.split(",")
        found = [_HOST.fullmatch(word.strip()) for word in words]
        require(all(found), f"--hosts {self.hosts}: must be names with numbers of ranks, such as n1:2,n2:2")
        return {one[1]: int(one[2] or 1) for one in found if one}


PROBE_SECONDS = 15.0
AT_ONCE = 64


def living(hosts: Iterable[str], probe: str) -> list[str]:
    """The hosts for which the command ``probe``, with the name in place of ``{host}``, ends with status 0 in time."""

    def lives(host: str) -> bool:
        words = [word.replace("{host}", host) for word in shlex.split(probe)]
        try:
            done = subprocess.run(  # in a group of its own: a signal to ours says nothing about the host
                words, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_SECONDS, check=False,
                process_group=0,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    names = list(hosts)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [host for host, there in zip(names, pool.map(lives, names), strict=True) if there]


def taken(hosts: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The first hosts with room for ``ranks`` in all; the last one with no more ranks than are needed."""
    found = {}
    for name, slots in hosts.items():
        if ranks > 0:
            found[name] = min(slots, ranks)
            ranks -= slots
    return found
