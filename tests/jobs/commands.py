"""Run command lines of trainers' commands one after the other in one MPI job: ``commands.py FOLDER NUMBER``.

Starting an MPI job takes seconds, mostly for importing torch, and a run of a tiny model takes milliseconds. Each
command gets a communicator over the first ranks of the job, and ends as `launch.run` would end it. A crash ends the
whole job. Each rank waits for a byte in the named pipe RANK.asked of FOLDER; then the job runs the command lines of
NUMBER.runs.json, writes NUMBER.outcomes.json, and waits for the next number. Null in place of command lines ends it, as
does the death of the process that holds the pipes.

Runs: a list of [ranks, arguments, command, such as pretrain_gpt, signals, standard input]; signals: a list
of [place, iteration, rank, name], where the rank sends itself a signal in a "step", a "save" or an "evaluation" of this
iteration; standard input: the text for rank 0. Outcomes: for each run, the exit code, standard output and standard
error of each of its ranks.
"""

import io
import json
import os
import signal
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from mpi4py import MPI

from commengine import Communicator, UsageError, launch
from trainers.checkpoints import run_state
from trainers.run import loop
from trainers.run.signals import SignalListener
from trainers.training.trainer import Trainer

HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}


class Tee(io.StringIO):
    """Keep the text, and also show it at once, because nothing else is seen of a job that is aborted."""

    def write(self, text: str) -> int:
        sys.__stderr__.write(text)
        return super().write(text)


HEARING_S = 2.0  # for a signal to be heard; one that a run does not listen to is never heard


class Signals:
    """Sends the signals of one run, at the place where each belongs, before the real work is done there.

    It waits until the run's listener, a thread, has heard the signal: on a busy machine the work may otherwise be done
    before.
    """

    def __init__(self) -> None:
        self.heard = threading.Event()
        hear = SignalListener._hear
        SignalListener._hear = lambda listener, number: (hear(listener, number), self.heard.set())
        self.planned: list[tuple[str, int, int, str]] = []
        self.step, self.save, self.evaluate = Trainer.step, run_state.CheckpointSaver.start, loop.evaluate_sources
        self.iteration = 0
        Trainer.step = lambda trainer: self.in_step(trainer)
        run_state.CheckpointSaver.start = lambda saver: self.send("save") or self.save(saver)
        loop.evaluate_sources = lambda *rest: self.send("evaluation") or self.evaluate(*rest)

    def in_step(self, trainer):
        self.iteration = trainer.iteration + 1
        self.send("step")
        return self.step(trainer)

    def send(self, place):
        for planned, iteration, rank, name in self.planned:
            if (planned, iteration, rank) == (place, self.iteration, MPI.COMM_WORLD.rank):
                self.heard.clear()
                os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
                self.heard.wait(HEARING_S)


def run(comm: MPI.Intracomm, arguments: list[str], command: str, said: str) -> dict[str, object]:
    sys.argv = [command, *arguments]
    sys.stdin = io.StringIO(said if comm.rank == 0 else "")
    out, err = io.StringIO(), Tee()
    with redirect_stdout(out), redirect_stderr(err), launch.abort_on_error():
        try:
            with Communicator(comm) as world:
                code: object = import_module(f"trainers.{command}").main(world) or 0
        except UsageError as error:
            code = 2
            if comm.rank == 0:
                print(f"error: {error}", file=sys.stderr)
        except SystemExit as stop:
            code = stop.code or 0
    for number, handler in HANDLERS.items():  # a command ignores signals after its end
        signal.signal(number, handler)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def wait(request: MPI.Request) -> None:
    """Wait for all ranks. A rank that wakes up often takes a core from two that wait for each other, for a while."""
    pause = 0.001
    while not request.Test():
        time.sleep(pause)
        pause = min(2 * pause, 0.005)


def awaited(world: MPI.Intracomm, asked: io.RawIOBase, path: Path) -> Any:
    """The content of a file of JSON, when there is a byte in the pipe ``asked``."""
    if not asked.read(1):
        world.Abort(1)
    return json.loads(path.read_text())


if __name__ == "__main__":
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    world, signals = MPI.COMM_WORLD, Signals()
    pipe = (folder / f"{world.rank}.asked").open("rb", buffering=0)
    while (asked := awaited(world, pipe, folder / f"{number}.runs.json")) is not None:
        mine = []
        for ranks, arguments, command, planned, said in asked:
            signals.planned = planned
            part = world.Split(0 if world.rank < ranks else 1)
            if world.rank < ranks:
                mine.append(run(part, arguments, command, said))
            else:
                mine.append(None)
            wait(world.Ibarrier())
            part.Free()
        every = world.gather(mine)
        if every is not None:
            ended = [[one for one in ranks if one is not None] for ranks in zip(*every, strict=True)]
            beside = folder / f"{number}.outcomes.tmp"
            beside.write_text(json.dumps(ended))
            beside.rename(folder / f"{number}.outcomes.json")
        number += 1
