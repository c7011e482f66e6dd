"""Collectives through memory that the ranks of a node share: windows, flags, slots, and the level between nodes."""
