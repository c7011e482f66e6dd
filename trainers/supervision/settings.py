"""The options of `trainers.supervise`."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass

from commengine import UsageError
from trainers.options import COUNT, SECONDS, between, option, require, require_ranges

#: a count that may be 0, and seconds that may be 0
NONE_OR_MORE = between(0, 10**6)
_SIZE = re.compile(r"([1-9]\d{0,6})(?::([1-9]\d{0,6}))?")
_HOST = re.compile(r"([^\s:,]+)(?::([1-9]\d{0,6}))?")


@dataclass(frozen=True)
class Size:
    """A number of ranks, and the tensor size that ``{tensor}`` stands for; None: the command's own."""

    ranks: int
    tensor: int | None = None


@dataclass(frozen=True)
class Host:
    """A host of the run, and how many ranks it can take."""

    name: str
    slots: int = 1


@dataclass(frozen=True)
class SuperviseConfig:
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
    probe: str = option(
        "ssh -o BatchMode=yes -o ConnectTimeout=5 {host} true",
        "command that tells whether a host of --hosts is there, by status 0; asked before each start",
    )
    restarts: int = option(100, "restarts before it gives up", valid=NONE_OR_MORE)
    repeats: int = option(
        3, "crashes in a row at the same step after which it gives up; before the first step, without "
        "--hosts: after which it takes the next number of --ranks",
        valid=COUNT,
    )  # fmt: skip
    back_off: float = option(
        1.0, "seconds before the first restart; doubled with each crash that follows without a newer checkpoint",
        valid=NONE_OR_MORE,
    )  # fmt: skip
    longest_back_off: float = option(300.0, "the longest wait before a restart, in seconds", valid=NONE_OR_MORE)
    start_minutes: float = option(
        30.0, "a start that has not begun a step after this time is ended, and counts as a crash", valid=SECONDS
    )

    def validate(self) -> None:
        """Raise UsageError, naming the option and what is valid, unless all options can be used."""
        require_ranges(self)
        sizes, hosts = self.sizes(), self.host_list()
        numbers = [size.ranks for size in sizes]
        require(
            all(one > other for one, other in itertools.pairwise(numbers)),
            f"--ranks {self.ranks}: must fall, such as 4,2: each is taken where the one before cannot be started",
        )
        tensor = [size.tensor is not None for size in sizes]
        require(
            all(tensor) or not any(tensor), f"--ranks {self.ranks}: give a tensor size with all numbers, or with none"
        )
        require(
            not hosts or bool(sizes), f"--hosts {self.hosts}: needs --ranks, the numbers of ranks that may be started"
        )
        room = sum(host.slots for host in hosts)
        require(
            not hosts or numbers[0] <= room,
            f"--ranks {self.ranks}: the hosts of --hosts {self.hosts} take {room} ranks",
        )
        try:
            shlex.split(self.probe)
        except ValueError as error:
            raise UsageError(f"--probe {self.probe!r}: no command as a shell takes it: {error}") from error
        require(
            self.probe.strip() != "" and (not hosts or "{host}" in self.probe),
            f"--probe {self.probe!r}: must contain {{host}}, which stands for the host's name",
        )
        require(len({host.name for host in hosts}) == len(hosts), f"--hosts {self.hosts}: a host is there twice")

    def sizes(self) -> list[Size]:
        """The numbers of ``--ranks``; empty without it. Raises UsageError where they cannot be read."""
        if self.ranks is None:
            return []
        found = [_SIZE.fullmatch(word.strip()) for word in self.ranks.split(",")]
        require(all(found), f"--ranks {self.ranks}: must be numbers such as 4,2, or with tensor sizes 4:4,2:2")
        sizes = [Size(int(one[1]), int(one[2]) if one[2] else None) for one in found if one]
        for size in sizes:
            fits = size.tensor is None or size.ranks % size.tensor == 0
            require(fits, f"--ranks {self.ranks}: the tensor size {size.tensor} does not divide {size.ranks} ranks")
        return sizes

    def host_list(self) -> list[Host]:
        """The hosts of ``--hosts``; empty without it. Raises UsageError where they cannot be read."""
        if self.hosts is None:
            return []
        found = [_HOST.fullmatch(word.strip()) for word in self.hosts.split(",")]
        require(all(found), f"--hosts {self.hosts}: must be names with numbers of ranks, such as n1:2,n2:2")
        return [Host(one[1], int(one[2] or 1)) for one in found if one]
