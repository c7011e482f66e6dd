"""`python -m bench.data_parallel`: a training step on two replicas, against torch's DistributedDataParallel over gloo.

The network is ResNet-20 of two widths, with 0.3 and 10 million parameters. All contestants have two processes of one
thread, the same weights and images, alternate within one run (bench/contests/driver.py), and must report the same
losses; if they do not, the exit status is 1. ``--help`` has the options.
"""
