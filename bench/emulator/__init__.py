"""A cluster that this machine emulates: its ranks add up what they would compute, and its links delay messages.

``machine`` draws a cluster: devices, links, skew. ``schedules`` has the messages of each collective, ``network``
carries them over the links, and ``hub`` is the process that does so for all ranks and keeps the cluster's time.
``device`` adds up what a rank computes, ``rank`` puts the engine's collectives onto the network, and ``step`` runs the
real trainer so. ``predicting`` writes the cluster's file for bench.predict, ``layouts`` has the runs, ``job`` is what
the ranks do, which ``bench.contest emulator`` starts: they measure the cluster, or train on it.
"""
