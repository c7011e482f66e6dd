"""The training step of any model: forward, backward, reduction, clipping, update."""
