"""Run command lines of training commands one after the other in one MPI job: ``commands.py RUNS.json OUTCOMES.json``.

Starting an MPI job takes seconds, mostly for importing torch, and a run of a tiny model takes milliseconds. Each
command gets a communicator over the first ranks of the job, and ends as `launch.run` would end it. A crash ends the
whole job. RUNS: a list of [ranks, arguments, command, such as pretrain_gpt]. OUTCOMES: for each run, the exit code,
standard output and standard error of each of its ranks.
"""

import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from mpi4py import MPI

from commengine import Communicator, UsageError, launch
from trainers import pretrain_bert, pretrain_gpt

MAINS = {"pretrain_gpt": pretrain_gpt.main, "pretrain_bert": pretrain_bert.main}


class Tee(io.StringIO):
    """Keep the text, and also show it at once, because nothing else is seen of a job that is aborted."""

    def write(self, text: str) -> int:
        sys.__stderr__.write(text)
        return super().write(text)


def run(comm: MPI.Intracomm, arguments: list[str], command: str) -> dict[str, object]:
    sys.argv = [command, *arguments]
    out, err = io.StringIO(), Tee()
    with redirect_stdout(out), redirect_stderr(err), launch.abort_on_error():
        try:
            with Communicator(comm) as world:
                MAINS[command](world)
                code: object = 0
        except UsageError as error:
            code = 2
            if comm.rank == 0:
                print(f"error: {error}", file=sys.stderr)
        except SystemExit as stop:
            code = stop.code or 0
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    runs, outcomes = map(Path, sys.argv[1:])
    world, mine = MPI.COMM_WORLD, []
    for ranks, arguments, command in json.loads(runs.read_text()):
        part = world.Split(0 if world.rank < ranks else 1)
        if world.rank < ranks:
            mine.append(run(part, arguments, command))
        else:
            mine.append(None)
        done = world.Ibarrier()
        while not done.Test():  # not Barrier: it would keep a core busy
            time.sleep(0.002)
        part.Free()
    every = world.gather(mine)
    if every is not None:
        ended = [[one for one in ranks if one is not None] for ranks in zip(*every, strict=True)]
        outcomes.write_text(json.dumps(ended))
