"""Traces of collectives, ours and other tools': one table of formats (`formats`), and a module for each of them."""
