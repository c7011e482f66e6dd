"""A small model that learns from a large one: the teacher on the ranks of a run, and the loss that has both parts.

`objective.distilled_gpt` and `objective.distilled_bert` give a task of pretraining its teacher.
"""
