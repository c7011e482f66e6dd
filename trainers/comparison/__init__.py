"""Where two runs part: their settings, the digests of their steps, and the tensors of their checkpoints."""
