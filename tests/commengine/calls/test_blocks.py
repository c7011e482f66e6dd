"""What a call says of itself, the rule for the calls of a block, and in which order they run."""

import random
from types import SimpleNamespace

import pytest
import torch

from commengine import CollectiveError
from commengine.calls.blocks import check_independent, exchanges_first
from commengine.operations import OPERATIONS

RANKS = 4
ONE, FOUR = torch.zeros(3), torch.zeros(12)

#: by operation: arguments, then the tensor, reduction, root, bytes and peers that stand for the call
CALLS = {
    "all_reduce": ((ONE, "max"), (ONE, "max", None, 12, ())),
    "reduce_scatter": ((ONE, FOUR, "sum"), (FOUR, "sum", None, 48, ())),
    "all_gather": ((FOUR, ONE), (FOUR, None, None, 48, ())),
    "broadcast": ((ONE, 2), (ONE, None, 2, 12, ())),
    "reduce": ((ONE, 3, "avg"), (ONE, "avg", 3, 12, ())),
    "gather": ((None, ONE, 1), (ONE, None, 1, 48, ())),
    "scatter": ((ONE, FOUR, 1), (ONE, None, 1, 48, ())),
    "all_to_all": ((torch.zeros(12), FOUR), (FOUR, None, None, 48, ())),
    "all_to_all_v": ((ONE, FOUR, (1, 0, 2, 0), (6, 0, 4, 2)), (FOUR, None, None, 48, ())),
    "all_gather_v": ((FOUR, ONE, (3, 6, 0, 3)), (FOUR, None, None, 48, ())),
    "barrier": ((), (None, None, None, 0, ())),
    "send": ((ONE, 2), (ONE, None, 2, 12, (2,))),
    "recv": ((ONE, 3), (ONE, None, 3, 12, (3,))),
    "sendrecv": ((ONE, FOUR, 2, 3), (ONE, None, 2, 12, (2, 3))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_is_described_by_the_table_of_operations(name):
    args, (tensor, *about) = CALLS[name]
    call = OPERATIONS[name].called(args, RANKS)
    assert (call.name, call.args) == (name, args)
    assert call.tensor is tensor
    assert [call.redop, call.root, call.nbytes, call.peers] == about


def test_a_wrong_number_of_arguments_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        OPERATIONS["all_reduce"].called((ONE,), RANKS)


def call(name):
    return OPERATIONS[name].called(CALLS[name][0], RANKS)


def test_messages_of_a_block_become_one_exchange_before_its_collectives():
    block = [call(name) for name in ("all_reduce", "send", "barrier", "sendrecv", "recv")]
    exchange, *rest = exchanges_first(block)
    assert [one.name for one in rest] == ["all_reduce", "barrier"]
    assert exchange.name == "exchange"
    (transfers,) = exchange.args
    assert [(verb, peer) for verb, _, peer in transfers] == [("send", 2), ("send", 2), ("recv", 3), ("recv", 3)]
    assert exchange.tensor is ONE and exchange.nbytes == 12 + 12 + 48 + 12
    assert exchange.peers == (2, 3)


def test_a_block_without_messages_is_left_as_it_is():
    block = [call("broadcast"), call("all_gather")]
    assert exchanges_first(block) == block


def test_a_device_tensor_stands_for_an_exchange():
    from tests.support.device.device_stand_in import on_device

    there = on_device(torch.zeros(2))
    host, device = (OPERATIONS[name].called((one, 1), RANKS) for name, one in (("send", ONE), ("recv", there)))
    assert exchanges_first([host, device])[0].tensor is there


MEMBER = SimpleNamespace(rank=0, size=2, name="world")
T, OUT = torch.zeros(40), torch.zeros(64)


def refused(*calls):
    try:
        check_independent(MEMBER, [OPERATIONS[name].called(args, 2) for name, args in calls])
    except CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "calls",
    [
        (("send", (T, 1)), ("recv", (T, 1))),  # a swap in place
        (("recv", (T[:8], 1)), ("recv", (T[7:9], 1))),
        (("all_reduce", (T, "sum")), ("send", (T[39:], 1))),
        (("sendrecv", (T[:4], T[4:8], 1, 1)), ("send", (T[6:], 1))),
        (("broadcast", (T, 0)), ("broadcast", (T, 1))),
        (("reduce", (T, 1, "sum")), ("send", (T, 1))),  # here the reduce writes nothing, on the root it does
        # A span that ends far away hides none that begins earlier.
        (("all_gather", (OUT[:40], T[0:20])), ("reduce_scatter", (T[15:25], T[5:25], "sum"))),
        (("all_gather", (OUT[:10], T[:5])), ("reduce_scatter", (T[14:24], T[4:24], "sum"))),  # the other rank writes it
        (("all_reduce", (T[2:4], "sum")), ("send", (T[0:30], 1)), ("send", (T[1:20], 1)), ("barrier", ())),
    ],
)
def test_calls_of_a_block_that_depend_on_each_other_are_refused(calls):
    said = refused(*calls)
    assert "touch the same memory" in said and "make two blocks" in said
    assert f"{calls[0][0]}(" in said and f"{calls[1][0]}(" in said


@pytest.mark.parametrize(
    "calls",
    [
        (("send", (T, 1)), ("send", (T[3:], 1)), ("all_gather", (OUT, T[:32]))),  # all read it
        (("send", (T[:8], 1)), ("recv", (T[8:], 1))),
        (("reduce_scatter", (T[10:20], T[0:20], "sum")), ("all_reduce", (T[20:], "sum"))),
        (("all_gather", (T[:20], T[:10])), ("send", (T[20:], 1))),
        (("recv", (T[3:3], 1)), ("recv", (T, 1))),  # an empty tensor has no memory
    ],
)
def test_calls_of_a_block_that_do_not_depend_on_each_other_pass(calls):
    assert refused(*calls) == ""


def test_the_rule_for_blocks_is_exact():
    """Blocks of drawn calls, against a comparison of all pairs of elements that the calls read and write."""
    drawn, found = random.Random(0), 0
    for _ in range(3000):
        calls, touched = [], []
        for _ in range(drawn.randrange(1, 6)):
            spans = []
            for _ in range(2):
                start = drawn.randrange(40)
                spans.append((start, min(40, start + drawn.randrange(6))))
            (a, b), (c, d) = spans
            read, write = set(range(a, b)), set(range(c, d))
            kind = drawn.choice(["send", "recv", "all_reduce"] + ["sendrecv"] * (not read & write))
            if kind == "sendrecv":
                calls.append((kind, (T[a:b], T[c:d], 1, 1)))
            else:
                calls.append((kind, (T[c:d], "sum" if kind == "all_reduce" else 1)))
                read, write = (write, set()) if kind == "send" else (set(), write)
            touched.append((read, write))
        wrong = any(
            first[1] & (second[0] | second[1]) or second[1] & first[0]
            for number, first in enumerate(touched)
            for second in touched[:number]
        )
        assert bool(refused(*calls)) == wrong
        found += wrong
    assert 500 < found < 2500
