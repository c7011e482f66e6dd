"""Commands that measure what collectives cost, alone and inside a training step, and that predict it.

Every module here is a command, ``python -m bench.NAME``, as are the folders ``study`` and ``contest``; ``python -m
bench`` lists them. A folder holds what commands are made of:

- ``command``: the command line, its errors, and the files that a command writes
- ``timing``: how often a call is timed, on which clock, how the ranks begin it together, and calls that take turns
- ``transports``: the ways to run a collective that bench.collectives compares
- ``collective_study``: results of collectives: measuring, reading, tables, plots, fits
- ``step_study``: a training step, recorded and taken apart
- ``programs``: programs that do the same work and take turns within one run
- ``peers``: the programs of other libraries, the only code here that imports torch.distributed
- ``gpu_study``: the studies of bench.gpu
- ``checkup``: the parts of bench.doctor
- ``prediction``: the model of a step's time and memory
- ``clusters``: machines, described in YAML
- ``emulator``: a cluster that this machine emulates, for a contest
- ``results``: what the commands printed on the project's machines

Words with one meaning here: a *transport* is a way to run a collective. A *peer* is another library that this one is
measured against. A *contestant* is one program of a *contest*. A *round* gives each of the alternatives that are
compared one turn, in random order.
"""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m bench.NAME`, whose imports take seconds
    from commengine.extras import say_what_is_missing
    from commengine.job_end import end_on_interrupt

    end_on_interrupt()
    say_what_is_missing("study")
