"""The contests that prove this project's own figures: ``python -m bench.contest NAME``. A wheel does not have them.

A contest is one small object in the module of its name: `parts.base.Contest`, or `parts.programs.ProgramContest` if its
sides are programs. ``__main__`` has all that contests share: the command line, the heading, the table and the files.
"""

#: the contests, each with a line about it
CONTESTS = {
    "step": "a training step of GPT or BERT: ours, DTensor, DistributedDataParallel and plain torch",
    "data_parallel": "a step of a network on two replicas: our DataParallel and DistributedDataParallel",
    "pipelining": "a step on two pipeline stages: ours, and torch.distributed.pipelining",
    "context": "a step on a sequence that two ranks share: three methods, also on a slow link",
    "fields": "a step of a U-Net on a field: split in space by two ranks, and plain torch",
    "generation": "tokens a second: ours, transformers, DeepSpeed and vLLM",
    "corpus": "making a corpus: trainers.prepare_corpus and a script on datasketch",
    "loading": "loading other people's weights: each rank its slices, and safetensors' load_file",
    "saving": "checkpoints: at once, in the background, by torch.save, and loaded again",
    "norm_placement": "Figure 7 of the paper: BERT with its norms before and after the sums, at growing depth",
    "mechanisms": "steps with and without overlap, two levels and the like, also on a slow link",
    "deterministic": "a step and a reduction with the same bits at every layout, and without",
    "same_bits": "tiny runs at every layout, which must have the bits of the run on one rank",
    "rivals": "collectives of the engine, of three MPIs, oneCCL, DeepSpeed, gloo and loops in C",
    "emulator": "predicted and trained steps of a cluster that this machine emulates",
}
