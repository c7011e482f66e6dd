"""Checks of a run while it trains: replicas that differ, losses that jump, ranks that are slow."""
