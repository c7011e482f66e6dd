"""Measure how other people's weights are loaded: the seconds, and the memory of a rank above its share of the model.

    mpiexec -n 4 python -m bench.loading --save /scratch --output loading.md --json loading.json
    mpiexec -n 2 python -m bench.loading --load FOLDER --rounds 3

A folder of Hugging Face, of ``--load`` or with a random model that the command makes and removes, is loaded as
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
import shutil
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import progress, run_on_ranks
from bench.contests.driver import Spread, ratio
from commengine import Communicator, ProcessGrid, UsageError
from commengine.mpi import sleep_until_all
from commengine.rank_zero import gather_json, on_rank_zero
from tplayers import GPT, GPTConfig, initialize
from trainers.options import COUNT, HEADS, LAYERS, VOCABULARY, WIDTH
from trainers.trained import load_trained
from trainers.weights.export import SmallFiles, export
from trainers.weights.tensor_files import TensorFiles

COMMAND = "bench.loading"
OURS, THEIRS = "each rank its slices", "load_file and a copy, one rank"
_ANON = re.compile(r"RssAnon:\s+(\d+) kB")
#: seconds between two looks at the memory; seconds that a waiting rank sleeps
LOOK, NAP = 1e-3, 2e-3


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


def shape(given: Namespace) -> GPTConfig:
    """The random model: a Llama, or with ``--family gpt2`` a GPT-2, whose weights lie transposed in the file."""
    sizes: dict[str, Any] = {
        "num_layers": given.num_layers, "hidden_size": given.hidden_size,
        "num_attention_heads": given.num_attention_heads, "vocab_size": given.vocab_size,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    if given.family == "gpt2":
        return GPTConfig(**sizes)
    return GPTConfig(
        **sizes, normalization="RMSNorm", swiglu=True, position_embedding_type="rope", add_bias_linear=False
    )


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


def measure(world: Communicator, folder: Path, rounds: int) -> dict[str, Any]:
    """All that was measured. Collective."""
    with ProcessGrid(world, tensor=world.size) as grid:
        with peak() as highest:
            trained = load_trained(f"hf:{folder}", grid)
        share = sum(one.numel() * one.element_size() for one in trained.model.parameters())
        parameters = trained.settings.num_layers, trained.settings.hidden_size
        del trained
        memory = gather_json(world, [highest(), share])

        def ours() -> None:
            load_trained(f"hf:{folder}", grid)

        def theirs() -> None:
            if world.rank == 0:
                one_copy(folder)

        ours()
        theirs()  # the files are in the page cache from here on
        seconds: dict[str, list[float]] = {OURS: [], THEIRS: []}
        size = int(on_rank_zero(world, lambda: _bytes(folder)))
        with progress(world, rounds) as bar:
            for number in range(rounds):
                for name in ((OURS, THEIRS), (THEIRS, OURS))[number % 2]:
                    seconds[name].append(timed(world, ours if name == OURS else theirs, size))
                bar.update()
    return {
        "ranks": world.size,
        "model": f"{parameters[0]} layers, {parameters[1]} wide",
        "bytes": size,
        "memory": [{"peak": most, "share": mine, "ratio": most / mine} for most, mine in memory],
        "rows": [
            {"name": name, "seconds": values, "spread": asdict(Spread.of(values)),
             "ratio": asdict(ratio(values, seconds[THEIRS]))}
            for name, values in seconds.items()
        ],
    }  # fmt: skip


def _bytes(folder: Path) -> int:
    with TensorFiles.open(folder):
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def markdown(result: dict[str, Any], given: Namespace) -> str:
    """The result in markdown."""
    worst = max(result["memory"], key=lambda one: one["ratio"])
    size = result["bytes"]
    lines = [
        *heading("Loading other people's weights", result),
        f"- a model of {result['model']}, {size / 1e6:.0f} MB of safetensors; {result['ranks']} ranks, one tensor "
        "group",
        f"- largest memory of a rank while it loads: {worst['peak'] / 1e6:.0f} MB, {worst['ratio']:.2f} of its share "
        f"of {worst['share'] / 1e6:.0f} MB",
        f"- {given.rounds} alternating rounds: median [min to max]; ratios are of the same round",
        "",
        "| way | s | GB/s | time over load_file |",
        "|---|---|---:|---|",
    ]
    for row in result["rows"]:
        spread = Spread(**row["spread"])
        rate = f"{size / 1e9 / spread.median:.2f}"
        lines.append(f"| {row['name']} | {spread.text()} | {rate} | {Spread(**row['ratio']).text()} |")
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--load", metavar="FOLDER", help="a folder of Hugging Face with safetensors")
    add("--save", metavar="DIR", help="an existing folder for a random model, if there is no --load")
    add("--rounds", type=int, valid=COUNT, default=7, help="rounds (default: %(default)s)")
    add("--family", choices=("llama", "gpt2"), default="llama", help="of the random model (default: %(default)s)")
    add("--num-layers", type=int, valid=LAYERS, default=16, help="(default: %(default)s)")
    add("--hidden-size", type=int, valid=WIDTH, default=1024, help="(default: %(default)s)")
    add("--num-attention-heads", type=int, valid=HEADS, default=16, help="(default: %(default)s)")
    add("--vocab-size", type=int, valid=VOCABULARY, default=32000, help="(default: %(default)s)")
    add_files(options)
    return options


def read(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """The options. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output, json=given.json)
    if (given.load is None) == (given.save is None):
        raise ValueError("--load FOLDER or --save DIR: one of the two is needed")
    for name in ("load", "save"):
        folder = getattr(given, name)
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--{name} {folder}: there is no such folder")
    if given.load is not None and not list(Path(given.load).glob("*.safetensors")):
        raise ValueError(f"--load {given.load}: has no safetensors files")
    return {**vars(given)}


def main(world: Communicator, argv: Sequence[str] | None = None) -> None:
    """Measure; rank 0 prints and writes. Collective over ``world``."""
    surroundings = environment(COMMAND)  # before measuring: the load average is that of other programs
    given = Namespace(**on_rank_zero(world, lambda: read(argv)))
    if given.load is not None:
        result = surroundings | measure(world, Path(given.load), given.rounds)
    else:
        with _random_model(world, given) as folder:
            result = surroundings | measure(world, folder, given.rounds)
    files = {"output": given.output, "json_file": given.json}
    on_rank_zero(world, lambda: publish(markdown(result, given), result, **files))


@contextlib.contextmanager
def _random_model(world: Communicator, given: Namespace) -> Iterator[Path]:
    """A new folder with a model, removed at the end. Rank 0 alone makes the model. Collective."""
    folder = Path(on_rank_zero(world, lambda: _new_folder(given.save)))
    try:
        alone = world.split(0 if world.rank == 0 else None)
        if alone is not None:
            with alone, ProcessGrid(alone, tensor=1) as grid:
                model = GPT(shape(given), grid.tensor)
                initialize(model, 1)
                export(model, grid, folder / "hf", SmallFiles())
                del model
        world.barrier()
        yield folder / "hf"
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder(save: str) -> str:
    try:
        return tempfile.mkdtemp(prefix="loading-", dir=save)
    except OSError as error:
        raise UsageError(f"--save {save}: {error.strerror}") from error


if __name__ == "__main__":
    run_on_ranks(COMMAND, main, parser)
