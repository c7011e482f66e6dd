"""Studies: what the collectives cost, alone and inside a training step."""
