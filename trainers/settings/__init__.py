"""The settings of commands, as plain records: a field is the flag of the same name, with dashes, as Megatron-LM's are.

A command's settings are several records in one class (`commands`), so that flags and YAML keys are flat. ``derived``
has what follows from several of them, and ``rules`` what they must fulfil together. The room imports no torch, so that
``--help`` is quick.
"""
