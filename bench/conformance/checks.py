"""The checks of an operator that communicates. Each runs on every rank of a job, and all ranks get one answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.conformance.operator import Operator, Truth, penalty

#: of float64, relative to the largest number of the truth: the rounding of other orders of addition is far below it
TOLERANCE = 1e-12
#: of finite differences in float64
STEP, DIFFERENCE_TOLERANCE = 1e-5, 1e-6
REPETITIONS = 3


@dataclass(frozen=True)
class Wrong:
    """The number that is furthest from the truth, and where it is. rows: of the ranks' inputs [rows, columns]."""

    what: str
    rank: int
    place: str
    got: float | str
    true: float | str
    rows: tuple[int, ...] = ()
    columns: int = 0


@dataclass(frozen=True)
class GradientCase:
    """An operator with inputs of a size. mpi: the communicator of the test itself, of mpi4py."""

    operator: Operator
    mpi: Any
    rows: tuple[int, ...]
    columns: int

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs of all ranks."""
        return self.operator.inputs(self.rows, self.columns)

    def differentiated(
        self, leaf: Tensor | None, weights: Sequence[Tensor], around: Callable[[Tensor], Tensor] = lambda y: y
    ) -> tuple[Tensor, Tensor]:
        """This rank's output, and its gradient: zeros [0] on a rank without an input, or if nothing arrived."""
        out = self.operator.function(leaf)
        if out.requires_grad:
            torch.autograd.backward(around(out), fitted(weights[self.mpi.rank], out))
        return out.detach(), torch.zeros(0) if leaf is None else gradient_of(leaf)

    def worst(self, what: str, mine: Tensor, true: Tensor, tolerance: float = TOLERANCE) -> Wrong | None:
        """The element on any rank that is furthest from the truth, if it is too far. Collective over ``mpi``."""
        every = [one for one in self.mpi.allgather(self._here(what, mine, true, tolerance)) if one is not None]
        return max(every, key=lambda one: one[0])[1] if every else None

    def _here(self, what: str, mine: Tensor, true: Tensor, tolerance: float) -> tuple[float, Wrong] | None:
        rank = self.mpi.rank
        if mine.shape != true.shape and mine.numel() + true.numel() > 0:  # empty tensors are all the same
            shapes = f"shape {list(mine.shape)}", f"shape {list(true.shape)}"
            return float("inf"), Wrong(what, rank, "", *shapes, self.rows, self.columns)
        mine, true = mine.detach().reshape(true.shape), true.detach()
        away = (mine - true).abs().nan_to_num(nan=float("inf"))
        if not away.numel() or float(away.max()) <= tolerance * max(1.0, float(true.abs().max())):
            return None
        flat = int(away.argmax())
        place = [int(n) for n in torch.unravel_index(torch.tensor(flat), true.shape)]
        got, wanted = float(mine.reshape(-1)[flat]), float(true.reshape(-1)[flat])
        return float(away.max()), Wrong(what, rank, str(place), got, wanted, self.rows, self.columns)

    def compared(
        self,
        leaf: Tensor | None,
        truth: Truth,
        weights: Sequence[Tensor],
        around: Callable[[Tensor], Tensor] = lambda y: y,
    ) -> Wrong | None:
        """Whether output and gradient are the truth's, and the output's weights are left as they are. Collective."""
        rank = self.mpi.rank
        kept = weights[rank].clone()
        out, gradient = self.differentiated(leaf, weights, around)
        wanted = truth.gradients[rank] if leaf is not None and leaf.requires_grad else torch.zeros(0)
        return (
            self.worst("output", out, truth.outputs[rank])
            or self.worst("gradient", gradient if wanted.numel() else wanted, wanted)
            or self.worst("cotangent after the backward", weights[rank], kept, 0.0)
        )

    def leaf(self) -> Tensor:
        """This rank's input, which requires a gradient."""
        mine: Tensor = self.inputs[self.mpi.rank].requires_grad_()
        return mine


def forward(case: GradientCase) -> Wrong | None:
    """The output is that of the serial definition, and the input is left as it is."""
    x, rank = case.inputs[case.mpi.rank], case.mpi.rank
    kept = x.clone()
    with torch.no_grad():
        out = case.operator.function(x)
    true = Truth.of(case.operator, case.inputs).outputs[rank]
    return case.worst("output", out, true) or case.worst("input after the call", x, kept, 0.0)


def dot_product(case: GradientCase) -> Wrong | None:
    """<A x, w> = <x, A* w> over all ranks, with A* as autograd computes it."""
    operator, rank = case.operator, case.mpi.rank
    truth = Truth.of(operator, case.inputs)
    weights = operator.weights(truth.outputs)
    out, gradient = case.differentiated(case.leaf(), weights)
    once = (not operator.shared_output or rank == 0), (not operator.shared_input or rank == 0)
    left = sum_of(case, product(out, weights[rank]) * once[0])
    right = sum_of(case, product(case.inputs[rank], gradient) * once[1])
    return case.worst("<x, A* w>, which must be <A x, w>", torch.tensor(right), torch.tensor(left))


def gradient(case: GradientCase) -> Wrong | None:
    """The gradient is that of the serial definition, where the ranks weigh their outputs differently."""
    truth = Truth.of(case.operator, case.inputs)
    return case.compared(case.leaf(), truth, case.operator.weights(truth.outputs))


def grad_check(case: GradientCase) -> Wrong | None:
    """The gradient is that of finite differences of the operator itself, by each element of each rank's input."""
    operator, rank = case.operator, case.mpi.rank
    weights = operator.weights(Truth.of(operator, case.inputs).outputs)
    _, found = case.differentiated(case.leaf(), weights)
    true = torch.zeros_like(found)
    for owner, x in enumerate(case.inputs):
        if operator.shared_input and owner:
            break
        for place in range(x.numel()):
            sides = []
            for step in (STEP, -STEP):
                moved = case.inputs[rank]
                if rank == owner or operator.shared_input:
                    moved.view(-1)[place] += step
                with torch.no_grad():
                    out = operator.function(moved)
                sides.append(sum_of(case, product(out, weights[rank]) * (rank == 0 or not operator.shared_output)))
            if rank == owner or operator.shared_input:
                true.view(-1)[place] = (sides[0] - sides[1]) / (2 * STEP)
    return case.worst("gradient", found, true, DIFFERENCE_TOLERANCE)


def strided(case: GradientCase) -> Wrong | None:
    """Input and cotangent are not contiguous: with gaps in memory, and transposed."""
    truth = Truth.of(case.operator, case.inputs)
    for layout in (with_gaps, transposed):
        leaf = layout(case.inputs[case.mpi.rank]).requires_grad_()
        weights = [layout(w) for w in case.operator.weights(truth.outputs)]
        if wrong := case.compared(leaf, truth, weights):
            return wrong
    return None


def expanded(case: GradientCase) -> Wrong | None:
    """The cotangent has stride 0, as that of ``out.sum()`` has. It is another number on each rank."""
    operator, rank = case.operator, case.mpi.rank
    outputs = Truth.of(operator, case.inputs).outputs
    weights = [torch.full_like(y, 1.0 + r * (not operator.shared_output)) for r, y in enumerate(outputs)]
    leaf = case.leaf()
    out = operator.function(leaf)
    if out.requires_grad:
        torch.autograd.backward(out.sum() * (1.0 + rank * (not operator.shared_output)))
    return case.worst("gradient", gradient_of(leaf), Truth.of(operator, case.inputs, weights).gradients[rank])


def no_grad(case: GradientCase) -> Wrong | None:
    """The last rank's input requires no gradient. The others' gradients are the same as with it."""
    truth = Truth.of(case.operator, case.inputs)
    leaf = case.leaf().requires_grad_(case.mpi.rank != case.mpi.size - 1)
    return case.compared(leaf, truth, case.operator.weights(truth.outputs))


def no_input(case: GradientCase) -> Wrong | None:
    """The ranks without an input give None."""
    truth = Truth.of(case.operator, case.inputs)
    leaf = case.leaf() if case.mpi.rank == case.operator.root else None
    return case.compared(leaf, truth, case.operator.weights(truth.outputs))


def no_cotangent(case: GradientCase) -> Wrong | None:
    """The last rank does not use its output: its backward gets None, which stands for zeros."""
    outputs = Truth.of(case.operator, case.inputs).outputs
    weights = case.operator.weights(outputs)
    unused = [len(weights) - 1] if not case.operator.shared_output else range(len(weights))
    true = Truth.of(case.operator, case.inputs, [w * (r not in unused) for r, w in enumerate(weights)])

    def around(y: Tensor) -> Tensor:
        return Unused.apply(y) if case.mpi.rank in unused else y  # type: ignore[no-untyped-call]

    return case.compared(case.leaf(), true, weights, around)


class Unused(torch.autograd.Function):
    """A use of a tensor that gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def second(case: GradientCase) -> Wrong | None:
    """The derivative of a penalty on the gradient is that of the serial definition."""
    operator, rank = case.operator, case.mpi.rank
    truth = Truth.twice(operator, case.inputs)
    leaf = case.leaf()
    out = operator.function(leaf)
    weight = fitted(operator.weights(truth.outputs)[rank], out)
    found = derivative((weight * torch.sin(out)).sum(), leaf, create_graph=True)
    return case.worst("second derivative", derivative(penalty(operator, found, rank), leaf), truth.gradients[rank])


def twice(case: GradientCase) -> Wrong | None:
    """A second backward of one graph adds the same gradient again."""
    truth, rank = Truth.of(case.operator, case.inputs), case.mpi.rank
    leaf = case.leaf()
    out = case.operator.function(leaf)
    weight = case.operator.weights(truth.outputs)[rank]
    for again in (True, False):
        if out.requires_grad:
            torch.autograd.backward(out, fitted(weight, out), retain_graph=again)
    return case.worst("gradient of two backwards", gradient_of(leaf), 2 * truth.gradients[rank]) or case.worst(
        "output after the backward", out, truth.outputs[rank]
    )


def repeated(case: GradientCase) -> Wrong | None:
    """The same call gives the same bits."""
    weights = case.operator.weights(Truth.of(case.operator, case.inputs).outputs)
    first = case.differentiated(case.leaf(), weights)
    for _ in range(REPETITIONS):
        for what, one, before in zip(
            ("output of a repetition", "gradient of a repetition"),
            case.differentiated(case.leaf(), weights),
            first,
            strict=True,
        ):
            if wrong := case.worst(what, one, before, 0.0):
                return wrong
    return None


def uneven(case: GradientCase) -> Wrong | None:
    """Forward and gradient, where the ranks' parts differ in their numbers of rows."""
    return forward(case) or gradient(case)


def no_rows(case: GradientCase) -> Wrong | None:
    """Forward and gradient, where the last rank has a part without rows, or all have none."""
    return forward(case) or gradient(case)


#: by name, in the order of the columns
CHECKS: dict[str, Callable[[GradientCase], Wrong | None]] = {
    "forward": forward, "dot product": dot_product, "gradient": gradient, "gradcheck": grad_check, "uneven": uneven,
    "no rows": no_rows, "strided": strided, "expanded": expanded, "no grad": no_grad, "no input": no_input,
    "no cotangent": no_cotangent, "second": second, "twice": twice, "repeated": repeated,
}  # fmt: skip


def cases(operator: Operator, check: str, mpi: Any) -> Iterator[GradientCase]:
    """The inputs for a check, the smallest first; none where the check does not apply."""
    ranks, kind = mpi.size, operator.rows
    applies = {
        "dot product": operator.linear,
        "uneven": kind in ("own", "parts") and ranks > 1,
        "no grad": ranks > 1 and operator.root is None and not (operator.shared_input or operator.together),
        "no input": ranks > 1 and operator.root is not None,
    }
    if not applies.get(check, True):
        return
    whole = ranks if kind in ("multiple", "parts") else 1
    case = GradientCase(operator, mpi, (whole,) * ranks, 1)
    if check == "uneven":
        own = tuple(rank + 1 for rank in range(ranks))
        yield replace(case, rows=own if kind == "own" else (2 * ranks - 1,) * ranks)
        yield replace(case, rows=own[::-1] if kind == "own" else (2 * ranks + 1,) * ranks, columns=2)
    elif check == "no rows":
        without = {"own": (2,) * (ranks - 1) + (0,), "parts": (ranks - 1,) * ranks}
        yield replace(case, rows=without.get(kind, (0,) * ranks), columns=2)
    else:
        yield case
        yield replace(case, rows=tuple(2 * n for n in case.rows), columns=3)


def ask(operator: Operator, check: str, mpi: Any) -> tuple[str, Wrong | None]:
    """The answer of a check: "yes", "WRONG" with the first example, or "-" where it does not apply. Collective."""
    answer = "-"
    for case in cases(operator, check, mpi):
        answer = "yes"
        if wrong := CHECKS[check](case):
            return "WRONG", wrong
    return answer, None


def fitted(weight: Tensor, out: Tensor) -> Tensor:
    """``weight``; zeros like an output of another shape, so that the backward runs on every rank."""
    return weight if weight.shape == out.shape else torch.zeros_like(out)


def product(a: Tensor, b: Tensor) -> float:
    """The dot product; not a number, if the numbers of elements differ."""
    return float(torch.dot(a.reshape(-1), b.reshape(-1))) if a.numel() == b.numel() else float("nan")


def gradient_of(leaf: Tensor) -> Tensor:
    """What a backward left at a leaf; zeros if nothing arrived."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def derivative(value: Tensor, x: Tensor, *, create_graph: bool = False) -> Tensor:
    """The gradient of ``value`` by ``x``; zeros if it does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(value, x, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(x) if found is None else found  # type: ignore[redundant-expr]  # allow_unused


def sum_of(case: GradientCase, mine: float) -> float:
    """The sum of the ranks' numbers. Collective."""
    return float(sum(case.mpi.allgather(mine)))


def with_gaps(x: Tensor) -> Tensor:
    """The same numbers, with other numbers between them in memory."""
    return torch.stack([x, x + 1], -1)[..., 0]


def transposed(x: Tensor) -> Tensor:
    """The same numbers, whose first dimension is the fastest in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() else x
