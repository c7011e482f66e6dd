"""One rank of a job that checks a module's operators, in the order of their table, from a number on.

    mpiexec -n 2 python -m bench.conformance.job FOLDER TASK

TASK is JSON: the module, the operators and checks that are asked for, and the number of the first cell. Each rank adds
lines of JSON to its own file in FOLDER: {"cells": [[operator, check], ...]} or {"problem": "..."} first, then for each
cell {"begin": n}, and {"cell": n, "answer": "..."}. An operator may wait for ever, which `bench.conformance.jobs` sees
in the files.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.conformance.checks import ask
from bench.conformance.operator import Operator
from commengine import UsageError
from commengine.errors import one_line

#: by the names of libraries, the modules that make operators of them
BUILT_IN = {
    "tplayers": "bench.conformance.ours",
    "torch.distributed.nn": "bench.peers.differentiable.distributed_nn",
    "functional_collectives": "bench.peers.differentiable.functional_collectives",
    "mpi4torch": "bench.peers.differentiable.mpi4torch_operators",
}


def main() -> None:
    """Answer the cells, and leave."""
    from mpi4py import MPI  # MPI starts here, and not on import

    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    # Line by line, so that a rank that is killed has left what it said.
    with (folder / f"{MPI.COMM_WORLD.rank}.jsonl").open("w", buffering=1, encoding="utf-8") as file:

        def say(**told: Any) -> None:
            file.write(json.dumps(told) + "\n")

        try:
            operators = found(task, MPI.COMM_WORLD)
        except UsageError as error:
            say(problem=one_line(str(error)))
            return
        except Exception as error:
            say(problem=one_line(f"{type(error).__name__}: {error}"))
            return
        cells = [(operator, check) for operator in operators for check in task["checks"]]
        say(cells=[(operator.name, check) for operator, check in cells])
        exchange, refused = Gathering(MPI.COMM_WORLD), False
        for number in range(task["first"], len(cells)):
            say(begin=number)
            answer = of_cell(*cells[number], exchange, say)
            if refused and answer["answer"] not in ("yes", "-", "refused"):
                return  # ranks that refused at different places may be out of step: a new job asks again
            refused = refused or answer["answer"] == "refused"
            say(cell=number, **answer)


def found(task: dict[str, Any], mpi: Any) -> list[Operator]:
    """The operators of the task's module. Raises UsageError if it makes none, and for names that it does not have."""
    make = getattr(load(task["module"]), "operators", None)
    if not callable(make):
        raise UsageError('it has no function "operators(comm)", which returns a list of operators')
    made = make(mpi.Dup())
    operators: list[Operator] = list(made) if isinstance(made, Iterable) else []
    if not operators or not all(isinstance(one, Operator) for one in operators):
        raise UsageError("operators(comm) must return a list of bench.conformance.operator.Operator, at least one")
    names = [operator.name for operator in operators]
    wanted = task["operators"] or names
    if unknown := [name for name in wanted if name not in names]:
        raise UsageError(f"--operators {unknown[0]}: {task['module']} has none of this name; it has {', '.join(names)}")
    return [operator for operator in operators if operator.name in wanted]


def load(name: str) -> ModuleType:
    """A built-in module by its library's name, a file, or a module of the Python path."""
    if not name.endswith(".py"):
        return importlib.import_module(BUILT_IN.get(name, name))
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is no module of Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RefusedByOperator(Exception):
    """A rank raised an error; every rank gets it at its next exchange."""


class Gathering:
    """The communicator of the checks: an exchange of values, or of the error of a rank that could not go on."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self.rank, self.size = mpi, int(mpi.rank), int(mpi.size)

    def allgather(self, value: Any, problem: str = "") -> list[Any]:
        """The values of all ranks. Raises RefusedByOperator on every rank if one tells a problem. Collective."""
        every = self._mpi.allgather((value, problem))
        for rank, (_, told) in enumerate(every):
            if told:
                raise RefusedByOperator(f"rank {rank}: {told}")
        return [value for value, _ in every]


def of_cell(operator: Operator, check: str, exchange: Gathering, say: Callable[..., None]) -> dict[str, Any]:
    """The answer of a cell; "refused" if a rank raised an error. Collective."""
    try:
        try:
            answer, wrong = ask(operator, check, exchange)
            return {"answer": answer, "example": wrong and asdict(wrong)}
        except RefusedByOperator:
            raise
        except Exception as error:
            problem = one_line(f"{type(error).__name__}: {error}", 300)
            say(raised=problem)
            exchange.allgather(None, problem)
            raise
    except RefusedByOperator as refused:
        return {"answer": "refused", "example": str(refused)}


if __name__ == "__main__":
    main()
