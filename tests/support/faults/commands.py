"""Every command as it reads a command line: in this process, or under mpiexec; and how it must end.

A command refuses by one short line that names an option or a file, with status 2. It accepts by doing its work, or,
where that takes seconds, by returning the settings that it checks before any rank starts to work.
"""

import contextlib
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import mpirun
from trainers.settings import derived

REFUSED, ACCEPTED = "refused", "accepted"
#: a message says what is wrong by an option, a file, or what is to be given
NAMES = re.compile(
    r"--[a-z]|\.(ya?ml|jsonl?|idx|bin|xxh3|txt|md)\b|/|RESULTS|DIR|TRACE|STUDY|give|unrecognized|nothing to fit"
)
LONGEST = 2500  # characters of a message, with the name of the command
HANGS_S = 30.0  # a command line that takes longer without being a long run
_MEMORY = {"available": 1 << 30, "shared": 1 << 30}

TINY = [
    "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
    "--make-vocab-size-divisible-by", "64", "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "2",
    "--eval-iters", "1",
]  # fmt: skip
GPT = [*TINY, "--sample-tokens", "2"]
MOCK = ["--mock-data", "--vocab-size", "100"]


@dataclass(frozen=True)
class Command:
    """A command. base: words with which its work takes little time. read: called with the words of a command line.

    parser: of the options from which words are drawn. ranks: whether it is started with mpiexec, as ``job``.
    """

    base: Sequence[str]
    read: Callable[[list[str]], Any]
    parser: Callable[[], Any]
    ranks: bool = False


def _world() -> Any:
    """A Communicator of this process alone."""
    from mpi4py import MPI

    from commengine import Communicator

    return Communicator(MPI.COMM_SELF)


def _bench(name: str, function: str, *more: Any) -> Callable[[list[str]], Any]:
    """Call the function of a bench command that checks its options. more: arguments after the words."""
    return lambda words: getattr(importlib.import_module(f"bench.{name}"), function)(words, *more)


def _parser(name: str, function: str = "parser") -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(name), function)()


def _options(name: str) -> Callable[[list[str]], Any]:
    """Read the options of a command that checks them in its parser alone."""
    return lambda words: importlib.import_module(name).parser().parse_args(words)


def _contest(name: str) -> Callable[[list[str]], Any]:
    """Read the options of a contest."""
    return lambda words: importlib.import_module("bench.contest.__main__").read(name, words)


def _contest_parser(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module("bench.contest.__main__").parser(name)


def _settings_parser(kind: str) -> Callable[[], Any]:
    def parser() -> Any:
        from commengine.options.declared import parser_of

        module, name = kind.rsplit(".", 1)
        return parser_of(getattr(importlib.import_module(module), name), "x")

    return parser


def _trains(task: str) -> Callable[[list[str]], Any]:
    """Read the options of a training command, and train if that takes no time."""

    def read(words: list[str]) -> Any:
        module = importlib.import_module(f"trainers.pretrain_{task}")
        config = module.COMMAND.read(words, 1)
        size = config.num_layers * config.hidden_size * (config.hidden_size + (config.ffn_hidden_size or 0))
        tokens = (config.global_batch_size or config.micro_batch_size) * config.seq_length
        steps, evaluated = config.train_iters, config.eval_iters * config.train_iters / config.eval_interval
        rows = config.vocab_size + config.make_vocab_size_divisible_by + derived.positions(config)
        kept = rows * config.hidden_size
        if (
            size * tokens * (steps + evaluated) < 1e8
            and max(kept, tokens) < 1e6
            and steps <= 20
            and config.seq_length < 200
            and getattr(config, "sample_tokens", 0) < 50
            and not config.compile
        ):
            with _world() as world:
                module.main(world)
        return config

    return read


def _prepare(words: list[str]) -> Any:
    from trainers import prepare_corpus

    with _world() as world:
        prepare_corpus.main(world)


def _alone(name: str) -> Callable[[list[str]], Any]:
    """Run a command of one process."""
    return lambda words: importlib.import_module(name).main(words)


def _supervised(words: list[str]) -> Any:
    """Read the options of supervise, before a command that fits ``--ranks 2,1``."""
    from trainers import supervise

    saved = ["--save", "run", "--load", "run", "--save-interval", "1"]
    launch = ["mpirun", "-n", "{ranks}", "python", "-m", "trainers.pretrain_gpt", *GPT, *MOCK, *saved]
    return supervise.read([*words, "--", *launch])


def _replay(words: list[str]) -> Any:
    from bench import replay

    with _world() as world:
        replay.main(world, words)


COMMANDS = {
    "trainers.pretrain_gpt": Command(
        [*GPT, *MOCK], _trains("gpt"), _settings_parser("trainers.tasks.gpt.GPTSettings"), ranks=True
    ),
    "trainers.pretrain_bert": Command(
        [*TINY, *MOCK], _trains("bert"), _settings_parser("trainers.tasks.bert.BERTSettings"), ranks=True
    ),
    "trainers.preprocess_data": Command(
        ["--input", "text.txt", "--train-bpe", "300", "--output-prefix", "made"], _alone("trainers.preprocess_data"),
        _settings_parser("trainers.preprocess_data.PreprocessSettings"),
    ),
    "trainers.prepare_corpus": Command(
        ["--input", "rows.jsonl", "--output", "made.jsonl"], _prepare,
        _settings_parser("trainers.cleaning.settings.CorpusSettings"), ranks=True,
    ),
    "trainers.supervise": Command(
        ["--ranks", "2,1"], _supervised, _settings_parser("trainers.supervision.settings.SuperviseSettings")
    ),
    "bench.study --only fit": Command(
        ["results.json", "--output", "model.json"], _alone("bench.study.fitting"), _parser("bench.study.fitting")
    ),
    "bench.study --only report": Command(
        ["results", "--output", "page.html"], _alone("bench.study.reporting"), _parser("bench.study.reporting")
    ),
    "bench.predict": Command(
        ["--preset", "gpt-1.2b", "--gpus", "8"], _alone("bench.predict"), _parser("bench.predict")
    ),
    "bench.collectives": Command(
        ["--max-bytes", "1K"], _bench("collectives", "settings", 2, _MEMORY), _parser("bench.collectives")
    ),
    "bench.collectives --only overhead": Command(
        [], _options("bench.collective_study.overhead"), _parser("bench.collective_study.overhead")
    ),
    "bench.collectives --only switch-points": Command(
        [], _bench("collective_study.switch_points", "parse"), _parser("bench.collective_study.switch_points")
    ),
    "bench.step": Command([*GPT, *MOCK], _bench("step", "read", 1), _parser("bench.step"), ranks=True),
    "bench.replay": Command(["recording", "--scale"], _replay, _parser("bench.replay")),
    **{
        f"bench.contest {name}": Command(base, _contest(name), _contest_parser(name))
        for name, base in {
            "step": ["--rounds", "1"], "generation": ["--rounds", "1"], "emulator": [], "mechanisms": [],
        }.items()
    },
    "bench.doctor": Command([], _options("bench.doctor"), _parser("bench.doctor")),
    "bench.gpu": Command(["losses", "--runs", "."], _bench("gpu", "parse"), _parser("bench.gpu")),
}  # fmt: skip


def here(name: str, words: Sequence[str], folder: Path, names: Sequence[str] = ("",)) -> str:
    """Give a command line to a command, in this process and in ``folder``. Returns REFUSED or ACCEPTED.

    names: a refusal must name one of these. Raises AssertionError unless the command ends as it must.
    """
    command, before, argv = COMMANDS[name], Path.cwd(), sys.argv
    out, err = io.StringIO(), io.StringIO()
    sys.argv = [name, *words]
    began = time.monotonic()
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            outcome, message = _read(command, list(words))
    finally:
        os.chdir(before)
        sys.argv = argv
    assert time.monotonic() - began < HANGS_S, f"took {time.monotonic() - began:.0f} s"
    said = [line for line in err.getvalue().splitlines() if "error: " in line]
    if outcome == REFUSED and message is None:
        assert len(said) == 1, f"the refusal is not one line: {err.getvalue()[-1000:]!r}"
        message = said[0]
    else:
        assert not said, f"printed {said}"
    if message is not None:
        require_good(message)
        assert any(name in message for name in names), f"names none of {names}: {message}"
    return outcome


def _read(command: Command, words: list[str]) -> tuple[str, str | None]:
    from commengine import UsageError

    try:
        command.read(words)
    except (UsageError, ValueError, OSError) as error:
        if isinstance(error, TimeoutError):
            raise
        return REFUSED, str(error)
    except SystemExit as stop:
        if stop.code not in (None, 0, os.EX_TEMPFAIL):
            if stop.code != 2:
                raise AssertionError(f"status {stop.code}") from stop
            return REFUSED, None
    return ACCEPTED, None


def require_good(message: str) -> None:
    """Raise AssertionError unless ``message`` is one short line that names an option or a file."""
    from commengine.errors import one_line

    message = one_line(message)  # as `on_rank_zero` and all commands do
    assert message and len(message) < LONGEST, f"{len(message)} characters: {message[:300]}"
    assert NAMES.search(message), f"names nothing: {message}"
    assert "Traceback" not in message and "Error(" not in message, message


def job(name: str, words: Sequence[str], folder: Path) -> str:
    """The same under ``mpiexec -n 2``."""
    done = mpirun.run(2, "-m", name, *words, timeout=120, cwd=folder)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    said = [line for line in done.stderr.splitlines() if "error: " in line]
    if done.returncode:
        assert done.returncode == 2 and len(said) == 1, (done.returncode, done.stderr[-2000:])
        require_good(said[0])
        return REFUSED
    assert not said, said
    return ACCEPTED
