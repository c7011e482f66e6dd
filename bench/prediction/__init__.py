"""The time and memory of a training step on a machine that we do not have."""
