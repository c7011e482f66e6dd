"""Saving and resuming."""
