"""Say on one page what a job has to run on, what does not fit, and whether every transport works.

    python -m bench.doctor
    mpiexec -n 4 python -m bench.doctor
    srun --mpi=pmi2 -N 2 --ntasks-per-node=4 python -m bench.doctor --json doctor.json

Start it as the job would be started. The page names MPI, mpi4py, the launcher and the thread level; for each host its
ranks, cores, shared memory, network devices and GPUs; the time and bandwidth of each transport, among the ranks of a
node and among all, with checked results; and what to change. The exit status is 1 if something is wrong: a wrong
result, or ranks with different versions.
"""

from __future__ import annotations

from bench.checkup.options import doctor_parser
from bench.command.start import answer_help, run_on_ranks

if __name__ == "__main__":  # before the other imports, which take seconds
    answer_help("bench.doctor", lambda: doctor_parser(__doc__))

import time
from collections.abc import Sequence
from dataclasses import asdict

from bench.checkup.facts import rank_facts
from bench.checkup.findings import WRONG, findings
from bench.checkup.page import page
from bench.checkup.self_test import self_test
from bench.command.files import publish
from bench.command.machine import environment
from bench.timing.starting import neighbours
from commengine import Communicator
from commengine.options.parser import OneLineParser
from commengine.rank_zero import gather_json, on_rank_zero

COMMAND = "bench.doctor"
#: the format of the JSON file
FORMAT = 2


def parser() -> OneLineParser:
    """The command line."""
    return doctor_parser(__doc__)


def main(world: Communicator, argv: Sequence[str] | None = None) -> int:
    """Look and measure; rank 0 prints and writes. Returns 1 if something is wrong. Collective over ``world``."""
    chosen = on_rank_zero(world, lambda: vars(parser().parse_args(argv)))
    result = {"format": FORMAT, **environment(COMMAND)}
    node = neighbours(world.mpi)[world.rank][0]  # the least rank that this one shares memory with
    ranks = gather_json(world, rank_facts() | {"node": node})
    began = time.monotonic()
    rows, skipped = self_test(world, chosen["seconds"]) if chosen["seconds"] else ([], [])

    def told() -> bool:
        found = findings(ranks, rows)
        result.update(
            rank_facts=ranks, rows=[row.to_json() for row in rows], skipped=skipped,
            self_test_s=time.monotonic() - began,
            findings=[asdict(one) for one in found],
        )  # fmt: skip
        publish(page(result, found), result, output=chosen["output"], json_file=chosen["json"])
        return any(one.level == WRONG for one in found)

    return int(on_rank_zero(world, told))


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
