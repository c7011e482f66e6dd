"""scatter: each rank gets its rows of one rank's tensor."""

from __future__ import annotations

from commengine.stream import Stream, Work

from .checks import Caller, TensorLike, check_rank, checked_tensor, root_tensor
from .gather import Gather


class Scatter(Gather):
    """The row of `scatter`, whose ways are `gather`'s."""

    name = "scatter"
    arguments, counted, whole = ("output", "input", "root"), "output", "input"


SCATTER = Scatter()


class ScatterCall:
    """`scatter`, as programs call it."""

    def scatter(
        self: Caller, output: TensorLike, input: TensorLike | None, root: int = 0, *, stream: Stream | None = None
    ) -> Work:
        """Give rank r the rows r * d0 ... of rank ``root``'s ``input`` [size * d0, ...] in ``output`` [d0, ...].

        input: ignored on the other ranks, and usually None there.
        output: of one shape and any one dtype of `commengine.dtypes` on all ranks; a 0-d one is a row of one number.

        Every rank calls it. Raises CollectiveError if ``root`` is not a rank of the group, and on the root if
        ``input`` is None, has another shape, dtype or device, or shares memory with ``output``.
        """
        root = check_rank(self, "scatter", "root", root)
        output = checked_tensor(self, "scatter", output, "output")
        input = root_tensor(self, "scatter", "input", input, output, root)
        return self._calls.run(SCATTER, (output, input, root), stream)
