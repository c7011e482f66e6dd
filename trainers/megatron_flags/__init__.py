"""Megatron-LM's flags that our commands do not have: an answer to each, in one table."""
