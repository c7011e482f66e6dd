"""Contests: programs that do the same work, stay alive, and alternate within one run.

A *contestant* is one program of a contest, on one or more ranks. ``driver`` starts contestants and gives each a turn
in every round; ``serving`` is the contestant's end of the protocol. ``step_task`` is the training step that all
contestants of bench.step_contest make, and ``training_step`` is our contestant there. ``engine_all_reduce`` is our
contestant of ``bench.gpu overhead``. The contestants of other libraries are in bench/peers.
"""
