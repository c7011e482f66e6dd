"""What a call says of itself to comparisons, traces and reports, and in which order the calls of a block run."""

import pytest
import torch

from commengine.calls.transport_call import TransportCall, exchanges_first
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
    "barrier": ((), (None, None, None, 0, ())),
    "send": ((ONE, 2), (ONE, None, 2, 12, (2,))),
    "recv": ((ONE, 3), (ONE, None, 3, 12, (3,))),
    "sendrecv": ((ONE, 2, FOUR, 3), (ONE, None, 2, 12, (2, 3))),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_is_described_by_the_table_of_operations(name):
    args, (tensor, *about) = CALLS[name]
    call = TransportCall.of(name, args, RANKS)
    assert (call.name, call.args) == (name, args)
    assert call.tensor is tensor
    assert [call.redop, call.root, call.nbytes, call.peers] == about


def test_a_wrong_number_of_arguments_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        TransportCall.of("all_reduce", (ONE,), RANKS)


def call(name):
    return TransportCall.of(name, CALLS[name][0], RANKS)


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
    host, device = TransportCall.of("send", (ONE, 1), RANKS), TransportCall.of("recv", (there, 1), RANKS)
    assert exchanges_first([host, device])[0].tensor is there
