"""Whether all ranks of a grid have the same layer, with the same parameters, and give it blocks of one field."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from commengine import CollectiveMismatch, Communicator, Decomposition
from commengine.calls.meeting import meet
from commengine.copies import difference_between
from tplayers.adjoint_pair import apply_pair
from tplayers.movement.compared import wants_gradient

_SETTINGS = (bool, int, float, str, tuple, torch.dtype, Decomposition)


def require_same_layer(layer: nn.Module, x: Tensor, problem: str | None, comm: Communicator) -> None:
    """Raise an error on every rank of ``comm``, unless the ranks can call ``layer`` with ``x`` together. Collective.

    problem: why this rank cannot; None if it can. Raises CollectiveError with the ranks' problems; CollectiveMismatch
    if the layer's arguments, its mode, the shapes of its parameters, or batch, channels, dtype or ``requires_grad`` of
    ``x`` differ, and if a tensor of the layer's state dict has other values. Other buffers belong to the rank's block.
    """
    words = "" if problem else f"a field {list(x.shape[:2])} of {x.dtype}, requires_grad={wants_gradient(x)}"
    meet(comm, type(layer).__name__)
    comm.compare(words, problem)
    comm.compare(_described(layer))
    found = difference_between(comm, [(name, _checksum(tensor)) for name, tensor in layer.state_dict().items()])
    if found is not None:
        raise CollectiveMismatch(
            f"{type(layer).__name__}: {found}; every rank must hold the same values: call tplayers.initialize with one "
            "seed on all ranks, or load the same state dict on all of them"
        )


def _described(layer: nn.Module) -> str:
    """The layer's class, arguments and mode, and what parameters it has. Private attributes are not arguments."""
    said = [f"{name} {parameter.dtype} {list(parameter.shape)}" for name, parameter in layer.named_parameters()]
    said += [
        f"{name}={value}"
        for name, value in vars(layer).items()
        if not name.startswith("_") and isinstance(value, _SETTINGS)
    ]
    return f"{type(layer).__name__}({', '.join(said).replace('torch.', '')})"


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of the values; it needs no library besides Python's own."""
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(zlib.crc32(x.reshape(-1).view(torch.uint8).cpu().numpy().data))
        return x.new_empty(0)

    apply_pair(tensor.detach(), look, torch.zeros_like)  # it shows torch.func's tensors as plain ones
    return found[0]
