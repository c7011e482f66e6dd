"""`python -m bench.fields`: a U-Net's training step on a field that two ranks split, against plain torch.

The contestants have the same weights, field, optimizer and memory layout: this project on two ranks of one thread,
torch in one process of one thread, and torch in one process of two threads. They alternate within one run
(bench/contests/driver.py) and must report the same losses; if they do not, the exit status is 1. ``--help`` has the
options.
"""
