"""Every table of operations in the repository agrees with `commengine.operations`.

These tests lead a developer who adds an operation there from place to place. A table that leaves operations out, or has
names of its own, has an exception below, with the reason.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch

from bench.collective_study import fitted_series, switch_points
from bench.step_study import recording, timeline
from bench.transports import in_process, peer_process
from bench.transports import operations as measured
from commengine import Communicator, compiled_ops, cost
from commengine.host.switch_points import AMD, KINDS, OTHERS, SwitchPoints
from commengine.operations import IN_MEMORY, OPERATIONS, REDUCING_IN_MEMORY
from commengine.operations.operation import Operation
from commengine.shared_memory import flags
from tplayers import formulas
from tplayers.formulas import step as training_step

ALL = frozenset(OPERATIONS)
PAIRWISE = frozenset(name for name, operation in OPERATIONS.items() if operation.pairwise)
REDUCING = frozenset(name for name, operation in OPERATIONS.items() if operation.reduces)
COLLECTIVE = ALL - PAIRWISE
UNEVEN = frozenset(name for name, operation in OPERATIONS.items() if operation.uneven)
FORMULAS = tuple(dict.fromkeys(operation.formula for operation in OPERATIONS.values() if operation.formula is not None))

#: table -> (operations that it leaves out, names of its own), each with the reason
LEFT_OUT = {
    # bench names a message after its sender's call, see below
    "bench.transports.in_process.Engine.operations": {"recv"},
    "bench.transports.in_process.Mpi4py.operations": {"recv"},
    **{f"bench.transports.peer_process.PEERS[{name!r}].operations": {"recv"} for name in peer_process.PEERS},
    # the loops in C have no message one way
    "bench.transports.peer_process.PEERS['c-loop'].operations": {"send", "recv", *UNEVEN},
    # oneCCL's C++ interface has no gather and no scatter, and DeepSpeed has one operator
    "bench.transports.peer_process.PEERS['oneccl'].operations": {"send", "recv", "gather", "scatter", *UNEVEN},
    "bench.transports.peer_process.PEERS['deepspeed'].operations": ALL - {"all_reduce"},
    # a barrier moves no bytes; a recv is the other end of a send
    "bench.transports.operations.FACTOR_OF": {"barrier", "recv"},
    # bench.collectives gives every rank one call; that of a message is a send, which half of the ranks receive
    "bench.transports.operations.OPERATIONS": {"recv"},
    # a series of bench.study --only fit is named after the call of rank 0, which sends
    "bench.collective_study.fitted_series.MESSAGES": {"recv"},
}
OWN_NAMES = {
    # a round trip, which bench.collectives measures with send and recv
    "bench.collective_study.fitted_series.MESSAGES": {"ping_pong"},
    # an all-gather whose output lies in a window, beside one whose input does
    "commengine.shared_memory.flags._OPERATIONS": {"gather_into"},
}
#: collectives under f and g, which layers use inside torch.compile: their operators in commengine.compiled_ops
COMPILED = {"all_reduce", "all_gather", "reduce_scatter"}
#: operations that no layer uses, only the trainer around it
NOT_COMPILED = {
    "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_v", "all_gather_v", "barrier", "send", "recv",
    "sendrecv",
}  # fmt: skip

TABLES = {
    "commengine.cost.OPERATIONS": (cost.OPERATIONS, FORMULAS),
    "commengine.cost.ALGORITHMS": (cost.ALGORITHMS, FORMULAS),
    "rows with a way through memory": ({n for n, o in OPERATIONS.items() if o.in_memory}, IN_MEMORY),
    "rows of them that reduce": ({n for n, o in OPERATIONS.items() if o.in_memory and o.reduces}, REDUCING_IN_MEMORY),
    "commengine.shared_memory.flags._OPERATIONS": (flags._OPERATIONS, {*IN_MEMORY, *UNEVEN}),
    "bench.transports.operations.UNEVEN": (measured.UNEVEN, UNEVEN),
    "bench.transports.operations.OPERATIONS": (measured.OPERATIONS, ALL),
    "bench.transports.operations.REDUCING": (measured.REDUCING, REDUCING),
    "bench.transports.operations.ROOTED": (measured.ROOTED, {n for n, o in OPERATIONS.items() if o.rooted}),
    "bench.transports.operations.SPLIT": (measured.SPLIT, {n for n, o in OPERATIONS.items() if o.split}),
    "bench.transports.operations.FACTOR_OF": (
        measured.FACTOR_OF,
        {n for n, o in OPERATIONS.items() if o.formula != n},
    ),
    "bench.transports.in_process.Engine.operations": (in_process.Engine.operations, ALL),
    "bench.transports.in_process.Mpi4py.operations": (in_process.Mpi4py.operations, ALL),
    **{
        f"bench.transports.peer_process.PEERS[{name!r}].operations": (peer.operations, ALL)
        for name, peer in peer_process.PEERS.items()
    },
    "bench.step_study.recording.REPLAYED": (recording.REPLAYED, ALL),
    "bench.step_study.recording.MESSAGES": (recording.MESSAGES, PAIRWISE),
    "bench.collective_study.fitted_series.MESSAGES": (
        fitted_series.MESSAGES,
        {n for n, o in OPERATIONS.items() if o.formula == "p2p"},
    ),
    "bench.collective_study.switch_points.SERIES": ({name for name, _ in switch_points.SERIES}, IN_MEMORY),
}


@pytest.mark.parametrize("name", TABLES)
def test_table_has_every_operation(name: str):
    table, expected = TABLES[name]
    assert set(table) == set(expected) - LEFT_OUT.get(name, set()) | OWN_NAMES.get(name, set())


def test_exceptions_are_exceptions():
    assert LEFT_OUT.keys() | OWN_NAMES.keys() <= TABLES.keys()
    assert all(left_out <= set(TABLES[name][1]) for name, left_out in LEFT_OUT.items())
    assert all(not own & ALL for own in OWN_NAMES.values())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("way", ["by_mpi", "by_nccl"])
def test_operation_has_its_ways(operation: str, way: str):
    row = OPERATIONS[operation]
    arguments = tuple(inspect.signature(getattr(row, way)).parameters)
    assert arguments in (("wire", *row.arguments), ("wire", "args"))
    assert getattr(type(row), way) is not getattr(Operation, way)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_communicator_has_the_operation(operation: str):
    parameters = inspect.signature(getattr(Communicator, operation)).parameters
    longer = {"sent": "sendtensor", "received": "recvtensor"}
    ours = {longer.get(name, name) for name in OPERATIONS[operation].arguments}
    assert parameters.keys() == {"self", "stream", *ours}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_row_is_sound(operation: str):
    row = OPERATIONS[operation]
    assert row.name == operation
    assert {row.counted, row.whole} - {None} <= set(row.arguments)
    assert (row.counted is None) == (not row.arguments)
    assert not (row.pairwise and (row.reduces or row.rooted or row.in_memory))
    assert row.split or not row.whole
    assert row.formula in (None, operation) or row.pairwise
    assert row.nbytes(6, 4) == (24 if row.counts_part else 6)


@pytest.mark.parametrize("operation", IN_MEMORY)
def test_operation_in_memory_has_its_routes(operation: str):
    reduces = operation in REDUCING_IN_MEMORY
    own = vars(type(OPERATIONS[operation]))
    assert {"in_window", "in_slots"} <= own.keys() and ("in_two_levels" in own) == reduces
    kinds = KINDS if reduces else ("full",)
    for table in (AMD, OTHERS):
        rows = SwitchPoints.load(table).rows
        assert {key.kind for key in rows if key.operation == operation} == set(kinds)
    assert [kind for name, kind in switch_points.SERIES if name == operation] == list(kinds)


def test_no_other_operation_has_a_route():
    ways = {"in_window", "in_slots", "in_two_levels"}
    assert {name for name, row in OPERATIONS.items() if ways & vars(type(row)).keys()} == set(IN_MEMORY)


def test_operation_is_compiled_or_is_not():
    prefix = f"{compiled_ops._library.ns}::"
    operators = {name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}
    assert operators == COMPILED
    assert COMPILED | NOT_COMPILED == ALL and not COMPILED & NOT_COMPILED


@pytest.mark.parametrize("operation", FORMULAS)
def test_every_formula_has_a_bus_factor(operation: str):
    assert 0 < cost.bus_factor(operation, 4) < 2


@pytest.mark.parametrize("operation", measured.OPERATIONS)
def test_every_measured_operation_has_a_bus_factor(operation: str):
    call = measured.CollectiveCall.of(operation, torch.float32, "sum", 0, 4, 64)
    assert (call.bus_factor > 0) == (operation != "barrier")  # which moves no bytes
    counted = OPERATIONS[operation].counted
    assert (call.nbytes >= 64) == (counted is not None)


def test_operations_that_can_be_in_place_are_known():
    """Those with one tensor, and all_gather, whose input may be rows of its output."""
    one_tensor = {name for name in COLLECTIVE if "tensor" in OPERATIONS[name].arguments}
    assert set(measured.IN_PLACE) == one_tensor | {"all_gather"}


def test_the_page_for_mpi_programs_has_every_operation():
    text = (Path(__file__).parent.parent / "docs" / "embedding.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"The operations are (.*?);", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == ALL


def test_a_step_has_known_operations_only():
    shape = formulas.TransformerShape(layers=2, hidden=64, heads=4, seq=32, vocab=128)
    collectives = [
        *training_step.tensor_parallel_collectives(shape, 2, 4, recompute="full"),
        *training_step.tensor_parallel_collectives(shape, 2, 4, recompute="full", sequence_parallel=True),
        *training_step.sequence_parallel_collectives(100, 4),
        *training_step.loss_collectives(shape, 2, 4),
        *training_step.data_parallel_collectives(1000, 2, zero1=True),
        *(one for _, one in training_step.scalar_collectives(4, 2, zero1=True, fp16=True)),
    ]
    assert {one.operation for one in collectives} <= set(FORMULAS)
    assert {one.operation for one in formulas.stage_messages(shape, 2, 1, 3, 4)} <= PAIRWISE
    assert {operation for _, operation in timeline.COLLECTIVES} <= ALL
