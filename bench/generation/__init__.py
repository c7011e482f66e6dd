"""`python -m bench.generation`: tokens per second of `tplayers.generate`, against `transformers`.

The contestants write greedy texts of one GPT-2 of random weights, alternate within one run (bench/contests/driver.py),
and must write the same tokens; if they do not, the exit status is 1. The command also measures the time of one more
token after a short and a long prompt, and compares the bytes that a token communicates with the formula. ``--help`` has
the options.
"""
