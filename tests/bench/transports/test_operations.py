"""The inputs and expected outputs of bench.collectives, against torch on all ranks' tensors in one process."""

import math

import pytest
import torch

from bench.transports.operations import DTYPES, IN_PLACE, OPERATIONS, REDOPS, REDUCING, SPLIT, Buffers, CollectiveCall
from commengine.dtypes import reduction_error

RANKS = (1, 2, 3, 5, 8)
#: the operations that move bytes
MOVING = [name for name in OPERATIONS if name != "barrier"]


def reduced(inputs, redop, order):
    """By torch, in the dtype itself, rounding at every step, in the order given."""
    step = {"sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[redop]
    total = inputs[order[0]].clone()
    for rank in order[1:]:
        total = step(total, inputs[rank])
    return total / len(inputs) if redop == "avg" else total


def truth(call, inputs, order):
    """The output of every rank, by torch; None where there is none."""
    ranks, root, name = range(call.ranks), call.root, call.operation
    if name in REDUCING:
        total = reduced(inputs, call.redop, order)
        if name == "reduce_scatter":
            return list(total.chunk(call.ranks))
        return [total if name == "all_reduce" or rank == root else None for rank in ranks]
    if name == "all_to_all_v":
        parts = [one.split(call.to(rank)) for rank, one in enumerate(inputs)]
        return [torch.cat([of[rank] for of in parts]) for rank in ranks]
    if name in ("all_gather", "all_gather_v"):
        return [torch.cat(inputs)] * call.ranks
    if name == "gather":
        return [torch.cat(inputs) if rank == root else None for rank in ranks]
    if name == "broadcast":
        return [inputs[root]] * call.ranks
    if name == "scatter":
        return list(inputs[root].chunk(call.ranks))
    if name == "sendrecv":
        return [inputs[rank - 1] for rank in ranks]
    if name == "send":
        half = call.ranks // 2
        return [None if rank < half else inputs[rank - half] for rank in ranks]
    assert name == "all_to_all", f"no expected output for {name}"
    return [torch.cat([inputs[source].chunk(call.ranks)[rank] for source in ranks]) for rank in ranks]


def cases():
    for operation in MOVING:
        for redop in REDOPS if operation in REDUCING else ["none"]:
            yield operation, redop


@pytest.mark.parametrize("operation, redop", list(cases()))
def test_expected_results_are_torchs_in_any_order(operation, redop):
    """Even where every step rounds to the dtype: so no sum, in whatever order, needs more digits than it has."""
    for name, dtype in DTYPES.items():
        for ranks in RANKS:
            if reduction_error(dtype, redop) and redop != "none":
                continue
            if operation == "send" and ranks % 2:  # which transports refuse
                continue
            root = ranks - 1
            call = CollectiveCall.of(operation, dtype, redop, root, ranks, 2500 * dtype.itemsize)
            assert call.whole > 2 * 1021  # more than two periods
            everyone = [Buffers(*(torch.empty(call.nbytes, dtype=torch.uint8) for _ in range(2))) for _ in range(ranks)]
            for rank, buffers in enumerate(everyone):
                buffers.reset(call, rank, False)
            inputs = [buffers.views(call, rank, False)[0].clone() for rank, buffers in enumerate(everyone)]
            for order in (list(range(ranks)), list(range(ranks))[::-1]):
                for rank, (buffers, right) in enumerate(zip(everyone, truth(call, inputs, order), strict=True)):
                    output = buffers.views(call, rank, False)[1]
                    if right is None:
                        assert not call.received(rank)
                        continue
                    assert buffers.wrong(call, rank) > 0 or ranks == 1 or order[0]  # poison, or a result already
                    output.copy_(right)
                    assert buffers.wrong(call, rank) == 0, (name, ranks, rank, order)
                    output[len(output) // 2] += 1
                    assert buffers.wrong(call, rank) == 1


def test_no_rank_can_be_left_out_of_a_result():
    """Replacing any rank's contribution by another's changes the result."""
    for redop in REDOPS:
        call = CollectiveCall.of("all_reduce", torch.float32, redop, 0, 4, 4096)
        inputs = torch.stack([call._tables[rank] for rank in range(4)])
        right = reduced(list(inputs), redop, range(4))
        for missing in range(4):
            for instead in set(range(4)) - {missing}:
                other = list(inputs)
                other[missing] = inputs[instead]
                assert not torch.equal(reduced(other, redop, range(4)), right)


def test_many_ranks_still_sum_exactly_in_bfloat16():
    call = CollectiveCall.of("all_reduce", torch.bfloat16, "sum", 0, 600, 4096)
    inputs = call._tables
    assert torch.equal(reduced(inputs, "sum", range(600)), call._reduced)
    assert call._integers.sum(0).unique().numel() > 40


@pytest.mark.parametrize("operation", MOVING)
def test_in_place_reads_the_input_from_the_output(operation):
    for rank in range(3):
        call = CollectiveCall.of(operation, torch.float32, "sum", 1, 3, 120)
        buffers = Buffers(torch.zeros(120, dtype=torch.uint8), torch.zeros(120, dtype=torch.uint8))
        buffers.reset(call, rank, operation in IN_PLACE)
        send, recv = buffers.views(call, rank, operation in IN_PLACE)
        assert (send.data_ptr() == recv.data_ptr() + (rank * 40 if operation == "all_gather" else 0)) == (
            operation in IN_PLACE
        )
        assert sum(piece.count for piece in call.sent(rank)) in (0, len(send))
        assert sum(piece.count for piece in call.received(rank)) in (0, len(recv))


#: (operation, size, count, factor): nccl-tests' documentation (PERFORMANCE.md) and its columns for -b 1000, 4 ranks of
#: floats
SIZES = [
    ("all_reduce", 1000, 250, 2 * 3 / 4),
    ("reduce_scatter", 1008, 63, 3 / 4),
    ("all_gather", 1008, 63, 3 / 4),
    ("broadcast", 1000, 250, 1),
    ("reduce", 1000, 250, 1),
    ("gather", 1008, 63, 3 / 4),
    ("scatter", 1008, 63, 3 / 4),
    ("all_to_all", 1008, 63, 3 / 4),
    ("sendrecv", 1000, 250, 1),
    ("barrier", 0, 0, 0),
    ("send", 1000, 250, 1),
    ("all_to_all_v", 1008, 63, 3 / 4),
    ("all_gather_v", 1008, 63, 3 / 4),
]


@pytest.mark.parametrize("operation, size, count, factor", SIZES)
def test_sizes_and_bus_factors_are_those_of_nccl_tests(operation, size, count, factor):
    call = CollectiveCall.of(operation, torch.float32, "sum", 0, 4, 997)
    assert (call.nbytes, call.count) == (size, count)
    assert math.isclose(call.bus_factor, factor)
    assert call.redop == ("sum" if operation in REDUCING else "none")
    assert call.root == (0 if operation in ("broadcast", "reduce", "gather", "scatter") else -1)


def test_the_sizes_of_every_operation_are_known():
    assert {operation for operation, *_ in SIZES} == set(OPERATIONS)
    assert {operation for operation, size, count, _ in SIZES if size != 4 * count} == SPLIT  # a float has 4 bytes


def test_no_operation_of_the_engine_is_missing():
    """Every operation is measured; a recv is the other end of a send. Those in memory have switch points."""
    from bench.collective_study import switch_points
    from bench.step_study import recording
    from commengine import operations

    assert {*OPERATIONS, "recv"} == set(operations.OPERATIONS) == set(recording.REPLAYED)
    assert {operation for operation, _ in switch_points.SERIES} == set(operations.IN_MEMORY)
    assert {name for name, kind in switch_points.SERIES if kind == "half"} == set(operations.REDUCING_IN_MEMORY)
    whole = {name for name, operation in operations.OPERATIONS.items() if operation.whole is not None}
    assert {*whole, "all_to_all"} <= SPLIT
