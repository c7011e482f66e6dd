"""The command line that all commands of bench share.

``parser`` makes a command's parser, ``values`` reads sizes, names and numbers, ``files`` holds the options for files
and writes them, ``machine`` describes what a result was measured on, and ``start`` runs a command.

An error of the user is one line on standard error, ``python -m bench.NAME: error: --option value: why; valid: ...``,
and the exit status 2. A command of several ranks prints it on rank 0 alone, and every rank ends with that status.
``--help`` starts neither MPI nor a device.
"""
