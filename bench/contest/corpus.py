"""Documents per second of trainers.prepare_corpus on one rank and on two, and of a plain datasketch script.

    python -m bench.contest corpus --text wiki.train.raw --vocab-file encoder.json --merge-file vocab.bpe

The documents are the paragraphs of --text (without it, of the documentation in Python's standard library) and copies of
them in which words are replaced. All contestants make the same corpus from the same file: they mend texts, drop
documents below 128 tokens with --tokenizer-model, or --vocab-file and --merge-file, drop what overlaps with
--decontaminate FILE, and drop
near-duplicates at a Jaccard similarity of 0.7 (25 bands of 5 rows, every candidate compared exactly). A time is that of
the whole command, from its start to its end; that without the start of Python, of MPI and the imports stands beside.
Each contestant has one thread a process. The corpora must agree.
"""

from __future__ import annotations

import json
import random
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.contest.parts.base import Case, Contest
from bench.contest.parts.jobs import failed
from bench.programs.driver import ContestError
from bench.timing.turns import Spread, take_turns
from trainers.data.stdlib_text import documents
from trainers.data.text_files import read_paragraphs
from trainers.files.reading import read_json
from trainers.options import between

PLAIN = "datasketch"
TIMEOUT_S = 600.0
ORIGINALS = 0.7  # the share of the documents that are no copies
SHARES = (0.0, 0.01, 0.03, 0.05, 0.1, 0.2)  # of a copy's words that are replaced
AGREEMENT = 0.002  # the share of the kept documents that may differ: pairs that one of the sketches does not find


class MadeCorpus:
    """A contestant, and what it made: seconds of its work without the start, and the kept texts.

    ranks: 0 for the plain script.
    """

    def __init__(self, ranks: int, source: Path, options: Sequence[str]) -> None:
        self.name = f"ours, {ranks} rank{'s' * (ranks > 1)}" if ranks else PLAIN
        self.ranks, self.output = ranks, source.with_name(f"{self.name}.jsonl")
        program = ["trainers.prepare_corpus", "--overwrite"] if ranks else ["bench.peers.datasketch_corpus"]
        self.words = [*program, "--input", str(source), "--output", str(self.output), *options]
        self.inside: list[float] = []
        self.kept: set[str] = set()

    def run(self) -> float:
        """The seconds of one run. Raises ContestError with its output if it fails."""
        log, began = self.output.with_suffix(".log"), time.perf_counter()
        if problem := failed(self.ranks, self.words, log, TIMEOUT_S):
            raise ContestError(f"{self.name}: {problem}\n{log.read_text()[-4000:]}")
        seconds = time.perf_counter() - began
        self.inside.append(read_json(self.output.with_name(f"{self.output.stem}-report.json"))["seconds"])
        with self.output.open(encoding="utf-8") as file:
            self.kept = {json.loads(line)["text"] for line in file}
        return seconds


class CorpusContest(Contest):
    """Making a corpus."""

    title = "Making a corpus"
    rounds = 5
    passes_on = True

    def add_options(self, add: Callable[..., Any]) -> None:
        """The texts and the ranks."""
        add("--text", metavar="FILE", help="text of which each paragraph is a document")
        add("--documents", type=int, valid=between(2, 10**9), default=20_000, help="documents, copies included")
        add("--ranks", type=int, valid=between(1, 1024), default=2, help="the largest number")

    def check(self, given: Any) -> None:
        """There is text."""
        if given.text is not None and not Path(given.text).is_file():
            raise ValueError(f"--text {given.text}: there is no such file")
        given.made = make_documents(paragraphs_of(given.text), given.documents, seed=0)

    def measure(self, given: Any, world: Any) -> Sequence[Case]:
        """The one case."""
        with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
            source = Path(folder) / "documents.jsonl"
            source.write_text("".join(json.dumps({"text": text}) + "\n" for text in given.made), encoding="utf-8")
            found = [MadeCorpus(ranks, source, given.rest) for ranks in range(given.ranks + 1)]
            turns = {one.name: one.run for one in found}
            return [compared(take_turns(turns, given.rounds), found, len(given.made))]

    def notes(self, given: Any, cases: Sequence[Case]) -> list[str]:
        """The texts."""
        size = sum(len(text.encode()) for text in given.made)
        return [f"- {len(given.made)} documents, {size / 1e6:.1f} MB of text; options of all: {shlex.join(given.rest)}"]


def compared(seconds: dict[str, list[float]], found: Sequence[MadeCorpus], count: int) -> Case:
    """The case of corpora that were made from ``count`` documents, the plain one first."""
    plain, case = found[0].kept, Case({}, seconds)
    for one in found:
        name, differing = one.name, len(one.kept ^ plain)
        case.facts[name] = {
            "s without start": Spread.of(one.inside).text(),
            "documents/s": count / case.spread(name).median,
            "kept": len(one.kept),
            "differing": differing,
        }
        if differing > AGREEMENT * len(plain):
            case.errors.append(f"{name}: {differing} of {len(one.kept)} documents differ from those of {PLAIN}")
    if any(one.kept != found[1].kept for one in found[1:]):
        case.errors.append("the corpus depends on the number of ranks")
    return case


def make_documents(paragraphs: Sequence[str], count: int, seed: int) -> list[str]:
    """``count`` documents in random order: paragraphs, and copies in which words are replaced by others of them.

    paragraphs: at least one; if there are too few, there are more copies.
    """
    rng = random.Random(seed)
    made = rng.sample(paragraphs, min(len(paragraphs), int(ORIGINALS * count)))
    originals = len(made)
    while len(made) < count:
        words = made[rng.randrange(originals)].split(" ")
        share = rng.choice(SHARES)
        made.append(" ".join(rng.choice(words) if rng.random() < share else word for word in words))
    rng.shuffle(made)
    return made


def paragraphs_of(text: str | None) -> list[str]:
    """The paragraphs of a file, or of the standard library's documentation. Raises ValueError if there are none."""
    if text is not None:
        found = [piece.text.strip() for piece in read_paragraphs(text)]
    else:
        found = [part.strip() for document in documents() for part in document.split("\n\n")]
    found = list(dict.fromkeys(filter(None, found)))
    if not found:
        raise ValueError(f"--text {text}: there is no paragraph in it")
    return found


CONTEST = CorpusContest()
