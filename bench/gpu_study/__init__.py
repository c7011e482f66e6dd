"""The studies of ``python -m bench.gpu``, one module each, with the name of its subcommand.

Each has ``run(world, given)`` or ``run(given)``, and ``add_options(parser)`` for the options of its own. A study writes
a row to its `RowFile` as soon as the row is measured.
"""
