"""Roll call: which rank of a program that hangs waits where. ``python -m commengine.rollcall script.py`` runs it.

Each rank has a process beside it, the *watcher*, which asks by signals where the rank is and whether it moves. The
watchers meet in a shared folder, without MPI. docs/hangs.md says how to read what the watcher of rank 0 prints.
"""
