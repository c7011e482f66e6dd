"""A small model that learns from a large one: the teacher on the ranks of a run, and the loss that has both parts.

`distilled` gives a task of pretraining its teacher.
"""
