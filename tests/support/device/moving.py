"""Tensors that are moved to a device together."""

import torch


def moved_together(tensors, device):
    """Copies of ``tensors`` on ``device``: those that share memory here share it there, too, at the same places."""
    storages = {}
    moved = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in storages:
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            storages[key] = whole.to(device, copy=True)
        moved.append(storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return moved
