"""The runs that the tests of a file compare, each of which is made when a test first asks for it."""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any


class Runs:
    """The folder of each run by its name: ``runs[name]``. So a selection of tests makes the runs that it needs.

    commands: the ranks and the arguments of each. folders: where each is to be saved; two runs may share one, and the
    first then is made before the second. pretrain: the fixture. more: for it.
    """

    def __init__(
        self, commands: Mapping[Any, tuple[int, list[Any]]], folders: Mapping[Any, Path], pretrain: Callable[..., Any],
        **more: Any,
    ) -> None:  # fmt: skip
        self._commands, self._folders, self._pretrain, self._more = commands, folders, pretrain, more
        self._made: set[Hashable] = set()

    def __getitem__(self, name: Any) -> Path:
        for one in self._commands:
            if self._folders[one] == self._folders[name] and one not in self._made:
                self._make(one)
            if one == name:
                break
        return self._folders[name]

    def _make(self, name: Hashable) -> None:
        ranks, words = self._commands[name]
        (outcome,) = self._pretrain((ranks, [*words, "--save", self._folders[name]]), **self._more)
        assert not any(outcome.codes), (name, outcome.err)
        self._made.add(name)
