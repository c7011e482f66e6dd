"""Attention over a sequence of which each rank of a context group has a part."""
