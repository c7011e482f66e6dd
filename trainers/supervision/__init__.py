"""Bringing a run to its end over crashes: what `trainers.supervise` decides, starts and asks."""
