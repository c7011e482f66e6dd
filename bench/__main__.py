"""The programs of this package: ``python -m bench``."""

from __future__ import annotations

import sys

from commengine.options.programs import answer

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

if __name__ == "__main__":
    sys.exit(answer("bench", PROGRAMS))
