"""Attention: its layer, the cache of keys and values, and rotary positions."""
