"""Copies of host tensors on a device, which the host does not wait for."""

from __future__ import annotations

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
