"""The studies of ``python -m bench.gpu``, one module each, with the name of its subcommand.

Each has ``add_options(parser)``, and ``run(world, given)`` or ``run(given)``. A study writes a row to its `RowFile` as
soon as the row is measured.
"""
