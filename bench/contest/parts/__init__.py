"""The parts of contests: ``base`` has the object that a contest is, and its table.

``programs`` has contests whose sides are programs, and ``on_ranks`` helps those whose sides are calls on the ranks of a
job; ``jobs`` runs other commands. The others belong to one contest each: ``grid`` and ``tiny_run`` to same_bits,
``pairs`` to mechanisms.
"""
