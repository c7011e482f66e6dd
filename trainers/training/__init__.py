"""The training step: forward, backward, reduction, clipping, update."""
