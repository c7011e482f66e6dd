"""Calls of operations below a Communicator: on a wire of NCCL, and in place of what a stream would run."""

from functools import partial

from commengine.device.nccl import NcclWire
from commengine.operations import OPERATIONS
from commengine.operations.exchange import EXCHANGE

WAYS = OPERATIONS | {"exchange": EXCHANGE}


class CallsOnNccl(NcclWire):
    """A wire that has the operations as methods."""

    def __getattr__(self, name):
        if name not in WAYS:
            raise AttributeError(name)
        return partial(WAYS[name].by_nccl, self)


def replace(monkeypatch, routes, **calls):
    """Let ``routes`` run functions of the operations' arguments in place of the operations of these names."""
    prepared = routes.prepared
    monkeypatch.setattr(
        routes, "prepared", lambda operation, args: calls.get(operation.name) or prepared(operation, args)
    )
