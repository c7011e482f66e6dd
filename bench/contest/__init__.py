"""The contests that prove this project's own figures: ``python -m bench.contest NAME``. A wheel does not have them.

A contest is one small object in the module of its name: `parts.base.Contest`, or `parts.programs.ProgramContest` if its
sides are programs. ``__main__`` has all that contests share: the command line, the heading, the table and the files.
"""

#: the contests, each with a line about it
CONTESTS = {
    "step": "a training step of GPT or BERT: ours, DTensor, DistributedDataParallel and plain torch",
    "generation": "tokens a second: ours, transformers, DeepSpeed and vLLM",
    "mechanisms": "steps with and without overlap, two levels and the like, also on a slow link",
    "same_bits": "tiny runs at every layout, which must have the bits of the run on one rank",
    "distillation": "small models that learn from a large one, and without one, from several seeds",
    "rivals": "collectives of the engine, of three MPIs, oneCCL, DeepSpeed, gloo and loops in C",
    "emulator": "predicted and trained steps of a cluster that this machine emulates",
}
