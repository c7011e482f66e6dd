"""Measure the documents per second of trainers.prepare_corpus on one rank and on two, and of a plain datasketch script.

    python -m bench.corpus --text wiki.train.raw --vocab-file encoder.json --merge-file vocab.bpe --output corpus.md

The documents are the paragraphs of --text (without it, of the documentation in Python's standard library) and copies of
them in which words are replaced. All contestants make the same corpus from the same file: they mend texts, drop
documents below 128 tokens if a tokenizer is given, drop what overlaps with --decontaminate if that is given, and drop
near-duplicates at a Jaccard similarity of 0.7 (25 bands of 5 rows, every candidate compared exactly). In each round
every contestant runs once, in random order. Its time is that of the whole command, from its start to its end; ratios
compare two times of one round. The corpora must agree, or the exit status is 1.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.command.files import add_files, check_writable, publish
from bench.command.machine import environment, heading
from bench.command.parser import CommandParser, new_parser
from bench.command.start import run_alone, user_errors
from bench.contests.driver import Contestant, ContestError, Spread, ratio
from trainers.data.stdlib_text import documents
from trainers.data.text_files import read_paragraphs
from trainers.options import COUNT, SEED, between

COMMAND = "bench.corpus"
PLAIN = "datasketch"
TIMEOUT_S = 600.0
ORIGINALS = 0.7  # the share of the documents that are no copies
SHARES = (0.0, 0.01, 0.03, 0.05, 0.1, 0.2)  # of a copy's words that are replaced
AGREEMENT = 0.002  # the share of the kept documents that may differ: pairs that one of the sketches does not find
#: (contestant, least speed over the plain script's)
GOALS = (("ours, 1 rank", 1.2), ("ours, 2 ranks", 2.2))
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


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


@dataclass
class MadeCorpus:
    """What a contestant made: seconds of each whole run, and of its work without the start; the kept texts."""

    seconds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)


def contestants(source: Path, folder: Path, options: Sequence[str], most_ranks: int) -> list[Contestant]:
    """All contestants, the plain script first. options: those that all of them know."""

    def output(name: str) -> list[str]:
        return ["--input", str(source), "--output", str(folder / f"{name}.jsonl"), *options]

    plain = ["-m", "bench.peers.datasketch_corpus", *output("plain")]
    found = [Contestant(PLAIN, 1, plain, ONE_THREAD)]
    for ranks in range(1, most_ranks + 1):
        argv = ["-m", "trainers.prepare_corpus", *output(f"ours{ranks}"), "--overwrite"]
        found.append(Contestant(f"ours, {ranks} rank{'s' * (ranks > 1)}", ranks, argv, ONE_THREAD, mpi=True))
    return found


def run(contestant: Contestant, corpus: MadeCorpus) -> None:
    """Run a contestant once. Raises ContestError with its output if it fails."""
    began = time.perf_counter()
    try:
        done = subprocess.run(
            contestant.command(), env={**os.environ, **contestant.env}, capture_output=True, text=True,
            timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ContestError(f"{contestant.name}: not done after {TIMEOUT_S:g} s") from error
    corpus.seconds.append(time.perf_counter() - began)
    if done.returncode:
        raise ContestError(f"{contestant.name}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    output = Path(contestant.argv[contestant.argv.index("--output") + 1])
    report = output.with_name(f"{output.stem}-report.json")
    summary = json.loads(report.read_text(encoding="utf-8") if report.exists() else done.stdout)
    corpus.inside.append(summary["seconds"])
    with output.open(encoding="utf-8") as file:
        corpus.kept = {json.loads(line)["text"] for line in file}


def report(found: dict[str, MadeCorpus], count: int) -> dict[str, Any]:
    """All that was measured, as --json has it, without `environment`. count: the documents of the input."""
    plain = found[PLAIN]
    rows: list[dict[str, Any]] = []
    for name, corpus in found.items():
        rows.append({
            "name": name,
            "seconds": corpus.seconds,
            "whole": asdict(Spread.of(corpus.seconds)),
            "inside": asdict(Spread.of(corpus.inside)),
            "documents_per_second": count / Spread.of(corpus.seconds).median,
            "speed_over_plain": asdict(ratio(plain.seconds, corpus.seconds)),
            "kept": len(corpus.kept),
            "differing": len(corpus.kept ^ plain.kept),
        })  # fmt: skip
    errors = [
        f"{row['name']}: {row['differing']} of {row['kept']} documents differ from those of {PLAIN}"
        for row in rows
        if row["differing"] > AGREEMENT * len(plain.kept)
    ]
    ours = [corpus.kept for name, corpus in found.items() if name != PLAIN]
    if any(kept != ours[0] for kept in ours):
        errors.append("the corpus depends on the number of ranks")
    return {"documents": count, "rows": rows, "errors": errors}


def markdown(result: dict[str, Any]) -> str:
    """The result in markdown."""
    lines = [
        *heading("Making a corpus", result),
        f"- {result['documents']} documents, {result['bytes'] / 1e6:.1f} MB of text; {result['stages']}",
        f"- {result['rounds']} rounds in random order: median [min to max]; one thread a process; times are of whole "
        "commands, those without the start of Python, of MPI and the imports stand beside",
        *[f"- **ERROR: {error}**" for error in result["errors"]],
    ]
    speeds = {row["name"]: row["speed_over_plain"]["median"] for row in result["rows"]}
    for name, least in GOALS:
        if name in speeds:
            reached = "reached" if speeds[name] >= least else "NOT reached"
            lines.append(f"- goal: {name} {least:g} times as fast as {PLAIN}: {reached}, {speeds[name]:.2f}")
    lines += [
        "",
        f"| contestant | s | s without start | documents/s | speed over {PLAIN} | kept | differing |",
        "|---|---|---|---:|---|---:|---:|",
    ]
    lines += [
        f"| {row['name']} | {Spread(**row['whole']).text()} | {Spread(**row['inside']).text()} "
        f"| {row['documents_per_second']:.0f} | {Spread(**row['speed_over_plain']).text()} | {row['kept']} "
        f"| {row['differing']} |"
        for row in result["rows"]
    ]
    return "\n".join([*lines, ""])


def parser() -> CommandParser:
    """The command line."""
    options = new_parser(COMMAND, __doc__)
    add = options.add_argument
    add("--text", metavar="FILE", help="text of which each paragraph is a document")
    add(
        "--documents",
        type=int,
        valid=between(1, 10**9),
        default=20_000,
        help="documents, copies included (default: %(default)s)",
    )
    add(
        "--ranks",
        type=int,
        valid=between(1, 1024),
        default=2,
        help="the largest number of ranks (default: %(default)s)",
    )
    add("--rounds", type=int, valid=COUNT, default=5, help="rounds (default: %(default)s)")
    add("--seed", type=int, valid=SEED, default=0, help="seed of the copies and the order (default: %(default)s)")
    add("--tokenizer-model", metavar="FILE", help="a tokenizer.json, to drop documents below 128 tokens")
    add("--vocab-file", metavar="FILE", help="GPT-2's encoder.json, to drop documents below 128 tokens")
    add("--merge-file", metavar="FILE", help="GPT-2's vocab.bpe; needs --vocab-file")
    add("--decontaminate", metavar="FILE", help="a held-out text, to drop documents that overlap with it")
    add_files(options)
    return options


def passed_on(given: Any) -> list[str]:
    """The options that all contestants get. Raises ValueError, naming the option."""
    files = {
        "--tokenizer-model": given.tokenizer_model, "--vocab-file": given.vocab_file, "--merge-file": given.merge_file,
        "--decontaminate": given.decontaminate,
    }  # fmt: skip
    for option, file in {**files, "--text": given.text}.items():
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{option} {file}: there is no such file")
    if (given.vocab_file is None) != (given.merge_file is None):
        raise ValueError("--vocab-file and --merge-file: GPT-2's tokenizer needs both")
    return [word for option, file in files.items() if file is not None for word in (option, file)]


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


def read(argv: Sequence[str] | None = None) -> tuple[Namespace, list[str]]:
    """The options, and those that all contestants get. Raises ValueError that names the option at fault."""
    given = parser().parse_args(argv)
    check_writable(output=given.output, json=given.json)
    return given, passed_on(given)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report. Returns the exit status: 1 if the corpora differ, or if a contestant failed."""
    with user_errors(COMMAND):
        given, options = read(argv)
        made = make_documents(paragraphs_of(given.text), given.documents, given.seed)
    result = environment(COMMAND)  # before measuring: the load average is that of other programs
    stages = ["mended"]
    stages += ["held-out text dropped"] if given.decontaminate else []
    stages += ["below 128 tokens dropped"] if given.tokenizer_model or given.vocab_file else []
    result["stages"] = ", ".join([*stages, "near-duplicates dropped"])
    result |= {"bytes": sum(len(text.encode()) for text in made), "rounds": given.rounds}
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        source = Path(folder) / "documents.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in made), encoding="utf-8")
        everyone = contestants(source, Path(folder), options, given.ranks)
        found = {one.name: MadeCorpus() for one in everyone}
        order = random.Random(given.seed)
        try:
            for number in range(given.rounds):
                for one in order.sample(everyone, len(everyone)):
                    run(one, found[one.name])
                    print(f"round {number + 1}, {one.name}: {found[one.name].seconds[-1]:.2f} s", file=sys.stderr)
        except ContestError as failure:
            print(f"error: {failure}", file=sys.stderr)
            return 1
    result |= report(found, len(made))
    publish(markdown(result), result, output=given.output, json_file=given.json)
    for error in result["errors"]:
        print(f"error: {error}", file=sys.stderr)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    run_alone(main)
