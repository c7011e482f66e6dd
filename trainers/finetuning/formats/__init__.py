"""The original files of the tasks: what they hold, and what is wrong with a damaged one."""
