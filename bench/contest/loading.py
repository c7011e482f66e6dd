"""How other people's weights are loaded: the seconds, and the memory of a rank above its share of the model.

    mpiexec -n 4 python -m bench.contest loading --save /scratch --output loading.md --json loading.json
    mpiexec -n 2 python -m bench.contest loading --load FOLDER --rounds 3

A folder of Hugging Face, of ``--load`` or with a random model that the contest makes and removes, is loaded as
``--load hf:FOLDER`` of the training commands is: the ranks are one tensor group, and each reads its own slices. The
other way is ``safetensors.torch.load_file`` and a copy of every tensor, by rank 0 alone, while the other ranks sleep:
the least that a program does which then cuts the tensors into parts. The ways alternate, and read from the page cache.
Before each, rank 0 uses as much memory as the model needs, and frees it: some virtual machines give free memory back to
their host, and wait when they need it again, which may take longer than either way.

The memory is the largest RssAnon (memory that is not of files) while the model is made and filled, above that before.
It is measured in the first load, so that no memory of an earlier one is used again. A thread looks every millisecond.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bench.command.start import progress
from bench.contest.parts.base import Case, Contest, add_fields, task_of
from bench.contest.parts.on_ranks import new_folder
from bench.peers.generated_text import write_model
from bench.programs.generation_task import GenerationTask
from bench.timing.turns import take_turns
from commengine import Communicator, ProcessGrid
from commengine.mpi import sleep_until_all
from commengine.rank_zero import gather_json, on_rank_zero
from trainers.options import HEADS, LAYERS, VOCABULARY, WIDTH
from trainers.trained import load_trained
from trainers.weights.tensor_files import open_tensors

OURS, THEIRS = "each rank its slices", "load_file and a copy, one rank"
_ANON = re.compile(r"RssAnon:\s+(\d+) kB")
#: seconds between two looks at the memory; seconds that a waiting rank sleeps
LOOK, NAP = 1e-3, 2e-3


@dataclass(frozen=True)
class RandomModel(GenerationTask):
    """The random model: a Llama, or a GPT-2, whose weights lie transposed in the file."""

    num_layers: int = 16
    hidden_size: int = 1024
    num_attention_heads: int = 16
    vocab_size: int = 32000
    family: str = "llama"


def resident() -> int:
    """The bytes of this process's memory that is not of files."""
    found = _ANON.search(Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@contextlib.contextmanager
def peak() -> Iterator[Callable[[], int]]:
    """A function that gives the largest `resident` within the block, above that before it, in bytes."""
    before = highest = resident()
    over = threading.Event()

    def look() -> None:
        nonlocal highest
        while not over.wait(LOOK):
            highest = max(highest, resident())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: highest - before
    finally:
        highest = max(highest, resident())
        over.set()
        thread.join()


def one_copy(folder: Path) -> None:
    """Load every weight file of a folder on this rank, and copy every tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        copies = {name: tensor.clone() for name, tensor in load_file(file).items()}
        assert copies


def claim(size: int) -> None:
    """Use ``size`` bytes of memory, and free them, so that the system has this much at hand."""
    with mmap.mmap(-1, size) as memory:
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1


def timed(world: Communicator, work: Callable[[], object], size: int) -> float:
    """The seconds of ``work``, which needs ``size`` bytes of memory, until all ranks have ended it. Collective."""
    if world.rank == 0:
        claim(size)
    sleep_until_all(world.mpi, NAP)
    start = time.perf_counter()
    work()
    sleep_until_all(world.mpi, NAP)
    return time.perf_counter() - start


class LoadingContest(Contest):
    """Loading other people's weights."""

    title = "Loading other people's weights"
    on_ranks = True

    def add_options(self, add: Callable[..., Any]) -> None:
        """The folder, or the sizes of a random model."""
        add("--load", metavar="FOLDER", help="a folder of Hugging Face with safetensors")
        add("--save", metavar="DIR", help="an existing folder for a random model, if there is no --load")
        add("--family", choices=("llama", "gpt2"), default="llama", help="of the random model (default: %(default)s)")
        add_fields(
            add, RandomModel, num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, vocab_size=VOCABULARY
        )

    def check(self, given: Any) -> None:
        """One folder is given, and it is there."""
        if (given.load is None) == (given.save is None):
            raise ValueError("--load FOLDER or --save DIR: one of the two is needed")
        if given.load is not None and not list(Path(given.load).glob("*.safetensors")):
            raise ValueError(f"--load {given.load}: has no safetensors files")

    def measure(self, given: Any, world: Communicator) -> Sequence[Case]:
        """Both ways. Collective over ``world``."""
        with contextlib.ExitStack() as stack:
            folder = Path(given.load) if given.load else stack.enter_context(_random_model(world, given))
            grid = stack.enter_context(ProcessGrid(world, tensor=world.size))
            with peak() as highest:
                trained = load_trained(f"hf:{folder}", grid)
            share = sum(one.numel() * one.element_size() for one in trained.model.parameters())
            shape = f"{trained.settings.num_layers} layers, {trained.settings.hidden_size} wide"
            del trained
            memory = gather_json(world, [highest(), share])
            size = int(on_rank_zero(world, lambda: _bytes(folder)))
            turns = {
                OURS: lambda: timed(world, lambda: load_trained(f"hf:{folder}", grid), size),
                THEIRS: lambda: timed(world, lambda: one_copy(folder) if world.rank == 0 else None, size),
            }
            with progress(world, given.rounds + 1) as bar:  # after the first round the files are in the page cache
                seconds = take_turns(turns, given.rounds, warmup=1, after=bar.update)
        case = Case({}, seconds, numbers={"model": shape, "bytes": size, "memory": memory}, baseline=THEIRS)
        case.facts = {name: {"GB/s": size / 1e9 / case.spread(name).median} for name in turns}
        return [case]

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The model, and the memory of a rank."""
        told = cases[0].numbers
        most, share = max(told["memory"], key=lambda one: one[0] / one[1])
        return [
            f"- a model of {told['model']}, {told['bytes'] / 1e6:.0f} MB of safetensors; one tensor group",
            f"- largest memory of a rank while it loads: {most / 1e6:.0f} MB, {most / share:.2f} of its share of "
            f"{share / 1e6:.0f} MB",
        ]


def _bytes(folder: Path) -> int:
    with contextlib.ExitStack() as files:
        open_tensors(folder, files)
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@contextlib.contextmanager
def _random_model(world: Communicator, given: Any) -> Iterator[Path]:
    """A new folder with a model, removed at the end. Rank 0 alone makes the model. Collective."""
    with new_folder(world, given.save) as folder:
        on_rank_zero(world, lambda: write_model(task_of(RandomModel, given), str(folder / "hf")))
        yield folder / "hf"


CONTEST = LoadingContest()
