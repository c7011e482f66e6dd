"""Copies of host tensors on a device, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """The host tensor ``x`` on ``device``; ``x`` itself if that is the host.

    For CUDA the copy is enqueued on the current stream and the host goes on. That needs pinned memory: from pageable
    memory the host would wait for all that the stream holds. PyTorch keeps the pinned memory until the copy is done.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def integers(values: Sequence[Any], device: torch.device | None = None) -> Tensor:
    """``values``, a list of integers or of rows of integers, as an int64 tensor on ``device``: see `to_device`.

    device: None for the host.
    """
    return to_device(torch.tensor(values, dtype=torch.int64, device="cpu"), device or torch.device("cpu"))
