"""The time and memory of a training step on a machine that is described in bench/clusters.

``model_cost`` adds up a step from ``kernels`` (one device's work) and ``group_cost`` (collectives). ``layout`` says
how a step is spread over devices, ``plan`` searches for the best layout, and ``paper`` compares with published
figures.
"""
