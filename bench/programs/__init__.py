"""Programs that do the same work, stay alive, and take turns within one run.

A *contestant* is one such program, on one or more ranks. ``driver`` starts contestants and asks each for its turns;
``serving`` is the contestant's end of the protocol. Every contestant is started as ``python -m
bench.programs.contestant MODULE TASK``. Here are the tasks, and our own contestants; those of other libraries are in
bench/peers. bench.contest and ``bench.gpu overhead`` start them.
"""
