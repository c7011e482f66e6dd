"""The runs that the tests of a file compare, each of which is made when a test first asks for it; what is compared."""

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor


def has_long_tests(request: pytest.FixtureRequest) -> bool:
    """Whether the tests that are to run have one of the file of a fixture that is marked ``long``."""
    return any(item.path == request.path and item.get_closest_marker("long") for item in request.session.items)


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
        status = 75 if "--exit-interval" in words else 0
        assert set(outcome.codes) == {status}, (name, outcome.err)
        self._made.add(name)


def measured(folder: Path, rows: Callable[..., list[dict[str, Any]]]) -> dict[tuple[int, str], float]:
    """The numbers of each row of a run's metrics that do not depend on time. rows: the fixture."""
    names = ("lm_loss", "mlm_loss", "sop_loss", "load_balancing_loss", "z_loss", "grad_norm", "validation_loss")
    return {
        (row["iteration"], name): row[name]
        for key in ("grad_norm", "validation_loss")
        for row in rows(folder, key)
        for name in names
        if row.get(name) is not None
    }


def weights(folder: Path, iteration: int) -> dict[str, Tensor]:
    """All parameters of a run's checkpoint."""
    (found,) = folder.glob(f"iter_*{iteration}")
    return {name: one for file in found.glob("model*.safetensors") for name, one in load_file(file).items()}
