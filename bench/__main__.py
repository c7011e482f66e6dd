"""The programs of this package, and the new names of old ones: ``python -m bench [OLD]``."""

from __future__ import annotations

import sys

from trainers.run.programs import answer

PROGRAMS = {
    "study": "study the machine at hand: its collectives, a training step, and what more ranks would do",
    "collectives": "time every collective by every transport; what the engine adds to MPI; where it leaves MPI",
    "step": "trace training steps: what each collective moved and took, beside the formulas",
    "replay": "run the collectives of a recorded step again, without its compute",
    "predict": "predict a training step on a machine that a file describes, such as this one",
    "doctor": "say on one page what a job has to run on, and what does not fit",
    "conformance": "ask libraries what the bits of a sum depend on, and operators whether their gradients are right",
    "gpu": "what a GPU does: speed, the cost of all-reduces, overlap, a profile, losses",
    "contest": "prove this project's own figures against other libraries (in the repository only)",
}
#: the programs that are contests of the same name now
SAME_NAME = (
    "data_parallel", "fields", "generation", "corpus", "loading", "saving", "norm_placement", "mechanisms",
    "deterministic", "rivals", "emulator",
)  # fmt: skip
#: by the old name of a program, the words that now stand after ``python -m``
RENAMED = {
    "step_contest": "bench.contest step",
    **{name: f"bench.contest {name}" for name in SAME_NAME},
    "overlap": "bench.contest mechanisms --mechanisms bucket_overlap --rate 0.5e9",
    "deterministic.layouts": "bench.contest same_bits --keep FILE",
    "environments.rivals": "bench.contest rivals --install",
    "all_reduce": "bench.collectives --operations all_reduce --no-out-of-place --over shared",
    "overhead": "bench.collectives --only overhead",
    "switch_points": "bench.collectives --only switch-points",
    "fit": "bench.study --only fit",
    "report": "bench.study --only report",
    "this_machine": "bench.predict --measure",
}

if __name__ == "__main__":
    sys.exit(answer("bench", PROGRAMS, RENAMED))
