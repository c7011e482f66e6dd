"""ParameterSet: whether a module still has the parameters that it had, and whether the same ones are trained."""

from __future__ import annotations

import itertools
import operator

from torch import nn


class ParameterSet:
    """The trained parameters of ``module``, as they are now. A parameter that is frozen later is no change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._look()

    def _look(self) -> None:
        self._tables = [table for one in self._module.modules() for table in (one._parameters, one._modules)]
        self._held = self._now()
        self._frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]

    def _now(self) -> list[object]:
        return list(itertools.chain.from_iterable(table.values() for table in self._tables))

    def changed(self) -> bool:
        """Whether a parameter has come or gone that is trained. Cheap as long as no module has changed its parts."""
        now = self._now()
        if len(now) != len(self._held) or not all(map(operator.is_, now, self._held)):
            if self.change():
                return True
            self._look()  # another part without trained parameters
        return any(parameter.requires_grad for parameter in self._frozen)

    def change(self) -> str:
        """The names of parameters that are trained now and were not, or the reverse; "" if there is none."""
        now = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        new = [name for name, p in now.items() if self._trained.get(name) is not p]
        there = dict(self._module.named_parameters(remove_duplicate=False))
        gone = [name for name, p in self._trained.items() if there.get(name) is not p and name not in new]
        said = [f"new or no longer frozen: {', '.join(new)}"] if new else []
        return "; ".join(said + ([f"gone: {', '.join(gone)}"] if gone else []))
