"""``commengine``, the command: ``table`` lists all commands, and ``entry`` runs one as ``python -m`` runs its module.

Importing this imports the standard library alone, so that the list and each ``--help`` come at once.
"""
