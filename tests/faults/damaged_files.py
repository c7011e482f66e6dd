"""Files that commands read, damaged at random: those of a checkpoint, of a data set, of results, of settings."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import mpirun
from tests.support.faults import drawing
from tests.support.faults.commands import ACCEPTED, COMMANDS, GPT, MOCK, Command, here
from tests.support.faults.parts import Case

TITLE = "damaged files: of checkpoints, data sets, tokenizers, results, machines, recordings"
DEMAND = "one short line that names the file, or a run that ends well; a change under a checksum is always refused"
CASES = 600
SHORT = range(0, CASES, 40)
LIMIT_S = 120.0

RUN = [*GPT, *MOCK, "--train-iters", "6", "--save-interval", "2", "--log-interval", "1"]
RESUME = [*RUN, "--load", "run", "--save", "run"]
UNVERIFIED = "--no-verify-checkpoints"
DATA = [*GPT, "--data-path", "data", "--vocab-size", "300", "--split", "80,20"]
MAKE = ["--no-append-eod", "--output-prefix", "made", "--input"]

#: (command, its words, the file that is damaged, whether a change of any byte must be refused)
READERS: list[tuple[str, list[str], str, bool]] = [
    ("trainers.pretrain_gpt", RESUME, "run/iter_0000004/state.json", True),
    ("trainers.pretrain_gpt", [*RESUME, UNVERIFIED], "run/iter_0000004/state.json", False),
    ("trainers.pretrain_gpt", RESUME, "run/iter_0000004/checksums", True),
    ("trainers.pretrain_gpt", RESUME, "run/iter_0000004/model.safetensors", True),
    ("trainers.pretrain_gpt", [*RESUME, UNVERIFIED], "run/iter_0000004/optimizer.safetensors", False),
    ("trainers.pretrain_gpt", RESUME, "run/latest", False),
    ("trainers.pretrain_gpt", RESUME, "run/metrics.jsonl", False),
    ("trainers.pretrain_gpt", [*DATA, "--verify-data"], "data.idx", True),
    ("trainers.pretrain_gpt", [*DATA, "--verify-data"], "data.bin", True),
    ("trainers.pretrain_gpt", [*DATA, "--verify-data"], "data.xxh3", True),
    ("trainers.pretrain_gpt", [*DATA, "--verify-data"], "data-tokenizer.json", True),
    ("trainers.pretrain_gpt", DATA, "data.idx", False),
    ("trainers.pretrain_gpt", DATA, "data.bin", False),
    ("trainers.pretrain_gpt", DATA, "data-tokenizer.json", False),
    ("trainers.preprocess_data", [*MAKE, "text.txt", "--tokenizer-model", "tokenizer.json"], "tokenizer.json", False),
    ("trainers.preprocess_data", [*MAKE, "text.txt", "--vocab-file", "vocab.txt"], "vocab.txt", False),
    ("trainers.preprocess_data", [*MAKE, "rows.jsonl", "--train-bpe", "280"], "rows.jsonl", False),
    ("trainers.prepare_corpus", ["--input", "rows.jsonl", "--output", "made.jsonl"], "rows.jsonl", False),
    ("bench.study --only fit", ["results.json", "--output", "model.json"], "results.json", False),
    ("bench.study --only report", ["results", "--output", "page.html"], "results/a.json", False),
    ("bench.study --only report", ["results", "--output", "page.html"], "results/b.md", False),
    ("bench.predict", ["--preset", "gpt-1.2b", "--gpus", "8", "--cluster", "machine.yaml"], "machine.yaml", False),
    ("bench.predict", ["--preset", "gpt-1.2b", "--gpus", "8", "--cluster", "fitted.yaml"], "model.json", False),
    ("bench.collectives --only switch-points", ["--json", "points.json"], "points.json", False),
    ("recording", ["recording"], "recording/rank-1.jsonl", False),
    ("bench.gpu", ["losses", "--runs", "."], "run/metrics.jsonl", False),
]  # fmt: skip

#: what a value of JSON is replaced by, as text
ODD = (
    "null", "[]", "{}", "-5", "0", "9223372036854775808", "1" + "0" * 400, "1e999", "NaN", "-Infinity", '"x"', '""',
    "true", "[" * 5000, '{"a":' * 200 + "1" + "}" * 200, '"\\ud800"', '"../../x"', "1.5", "[null]", f'"{"y" * 5000}"',
)  # fmt: skip


def run(case: Case) -> str:
    command, words, file, covered = READERS[case.number % len(READERS)]
    template = _template(case.shared / "damaged_files")
    folder = case.folder / "work"
    shutil.copytree(template, folder, symlinks=True, ignore=shutil.ignore_patterns("pipe", "huge"))
    path, draw = folder / file, case.random
    before = path.read_bytes()
    how = _damage(path, draw)
    changed = not path.is_file() or path.read_bytes() != before
    try:
        # A message may name the checkpoint or the data set that a file is of.
        names = (path.name, path.parent.name, f"--data-path {path.stem.removesuffix('-tokenizer')}")
        outcome = _recording(folder) if command == "recording" else here(command, words, folder, names)
        assert not (covered and changed and outcome == ACCEPTED), "was accepted"
    except AssertionError as error:
        raise AssertionError(f"{error} [{command} {file}: {how}]") from error
    return outcome


def _recording(folder: Path) -> str:
    """Parse a recording, as bench.replay does on each rank."""

    def read(_: list[str]) -> None:
        from bench.step_study import recording

        recording.parse(recording.read(folder / "recording"))

    COMMANDS["recording"] = Command([], read, lambda: None)
    try:
        return here("recording", [], folder)
    finally:
        del COMMANDS["recording"]


def _template(shared: Path) -> Path:
    """A folder with a whole file of each kind, made once."""
    folder = shared / "whole"
    if folder.exists():
        return folder
    making = shared / "making"
    shutil.rmtree(shared, ignore_errors=True)
    drawing.fixtures(making)
    for name in ("pipe", "huge", "loop"):
        (making / name).unlink()
    assert here("trainers.pretrain_gpt", [*RUN, "--exit-interval", "4", "--save", "run"], making) == ACCEPTED
    assert here("trainers.preprocess_data", [
        "--input", "text.txt", "--split-on-blank-lines", "--train-bpe", "280", "--output-prefix", "data", "--overwrite",
    ], making) == ACCEPTED  # fmt: skip
    assert here("bench.study --only fit", ["results.json", "--output", "model.json"], making) == ACCEPTED
    machine = (mpirun.ROOT / "bench" / "clusters" / "dgx-2h.yaml").read_text()
    (making / "machine.yaml").write_text(machine)
    (making / "fitted.yaml").write_text(machine.replace("\ninside:\n", "\ninside:\n  fitted: model.json\n"))
    shutil.copy(mpirun.ROOT / "commengine" / "host" / "switch_points_amd.json", making / "points.json")
    for command, words, _, _ in READERS:  # each reader accepts the whole file
        if command != "recording":
            copy = shared / "try"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(making, copy)
            assert here(command, words, copy) == ACCEPTED, (command, words)
            shutil.rmtree(copy)
    making.rename(folder)
    return folder


def _damage(path: Path, draw: random.Random) -> str:
    """Damage a file in one of many ways; returns the way."""
    content = path.read_bytes()
    ways: list[Callable[[], str]] = [
        lambda: _write(path, b"", "empty"),
        lambda: _write(path, content[: draw.randrange(len(content) + 1)], "cut short"),
        lambda: _flip(path, content, draw), lambda: _flip(path, content, draw), lambda: _flip(path, content, draw),
        lambda: _write(path, content + draw.randbytes(draw.randrange(1, 50)), "longer"),
        lambda: _write(path, draw.randbytes(len(content)), "random"),
        lambda: _write(path, content[len(content) // 3 :], "without its begin"),
        lambda: _replace(path, "pipe", os.mkfifo), lambda: _replace(path, "folder", os.mkdir),
        lambda: _replace(path, "missing", lambda _: None),
        lambda: _replace(path, "loop", lambda place: place.symlink_to(place.name)),
        lambda: _replace(path, "device", lambda place: place.symlink_to("/dev/zero")),
    ]  # fmt: skip
    if path.suffix in (".json", ".jsonl"):
        ways += [lambda: _odd_json(path, content.decode(), draw)] * 14
    elif path.suffix == ".yaml":
        ways += [lambda: _odd_yaml(path, content.decode(), draw)] * 14
    elif path.name == "latest":
        ways += [lambda: _write(path, draw.choice(ODD).encode() + b"\n", "odd")] * 5
    return draw.choice(ways)()


def _write(path: Path, content: bytes, how: str) -> str:
    path.write_bytes(content)
    return how


def _flip(path: Path, content: bytes, draw: random.Random) -> str:
    place = draw.randrange(max(len(content), 1))
    path.write_bytes(content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :])
    return f"a bit of byte {place}"


def _replace(path: Path, how: str, make: Callable[[Path], Any]) -> str:
    path.unlink()
    make(path)
    return how


def _odd_json(path: Path, text: str, draw: random.Random) -> str:
    """Replace, remove or repeat one value somewhere in the file."""
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = draw.randrange(len(lines))
    data = json.loads(lines[number])
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            visit(node[key])

    visit(data)
    odd = draw.choice(ODD)
    if not places or draw.random() < 0.05:
        lines[number], how = odd, f"all is {odd[:20]}"
    else:
        node, key = draw.choice(places)
        how = f"{key!r} is {odd[:20]}"
        if draw.random() < 0.2:
            del node[key]
            how = f"{key!r} is missing"
        else:
            node[key] = "@@@"
        lines[number] = json.dumps(data).replace('"@@@"', odd)
    path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
    return how


def _odd_yaml(path: Path, text: str, draw: random.Random) -> str:
    lines = text.splitlines()
    number = draw.choice([n for n, line in enumerate(lines) if ":" in line and not line.strip().startswith("#")])
    key = lines[number].partition(":")[0]
    odd = draw.choice((*ODD[:12], "&a [1]", "*a", "!!int 1", "[1, 2", "{a: 1}", ".inf", "-1", "1e400", "no", "'"))
    lines[number] = draw.choice((f"{key}: {odd}", f"{key}: {odd}", f"{lines[number]}\n{lines[number]}", "", f"{key}:"))
    path.write_text("\n".join(lines) + "\n")
    return f"line {number}: {lines[number][:60]!r}"
