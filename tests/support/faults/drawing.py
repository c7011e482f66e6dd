"""Drawing command lines and YAML files: an option of a command, and a value that it may or may never have."""

import json
import os
import random
import shutil
from argparse import BooleanOptionalAction, _HelpAction, _StoreTrueAction, _SubParsersAction
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import mpirun

INTEGERS = (
    "0", "1", "2", "3", "7", "16", "1000", "-1", "-0", "+5", " 5", "5 ", "1_0", "\u0665", "2147483647", "2147483648",
    str(2**63 - 1), str(2**63), str(10**30), "9" * 5000, "1e3", "1.5", "nan", "inf", "0x10", "true", "None", "abc",
    "--", "", "5,5", "5;5", "-" * 50, "1" * 200,
)  # fmt: skip
NUMBERS = (
    "0", "1", "-1", "0.5", "0.1", "1.0000001", "1e-300", "1e-45", "1e300", "1e999", "-1e999", "nan", "-nan", "inf",
    "1e", "1,5", "0x1p3", "1_0.0", "abc", "--", "", "2", "9" * 400, "1e99999999",
)  # fmt: skip
WORDS = (
    "", "--", "-", "a", "text.txt", "data", "data.bin", "missing", ".", "..", "/", "pipe", "/dev/zero", "/dev/null",
    "/dev/full", "/proc/self/mem", "loop", "empty", "binary", "huge", "x" * 300, "x" * 5000, "a\nb", "a b", "caf\udce9",
    "results.json", "results", "tokenizer.json", "vocab.txt", "rows.jsonl", "run.yaml", "~", "$HOME", "*", "{}", "[]",
    "null", "true", "0", "-1", "\u202e", "run", "run/latest", "'", '"', "\\", "%s", "%(prog)s", "{0}", "made", "old/x",
)  # fmt: skip
WEIGHTS = (
    "969,30,1",
    "1",
    "1,1",
    "0,0,0",
    "a",
    "1,,1",
    "-1,2",
    "1e99999999,1",
    "nan",
    "1,1,1,1",
    "1/3,1/0",
    "0.5 data",
)
#: what no option that is a number may have, whatever its range
NEVER_A_NUMBER = {"", "--", "abc", "None", "true", "nan", "-nan", "1e", "1,5", "5,5", "5;5", "-" * 50}

YAML_SHAPES = (
    "{key}: [true]", "{key}: [[1]]", "{key}: {{a: 1}}", "{key}: [1, null]", "{key}: *x", "{key}: &x 1",
    "{key}: !!int 1", "{key}: !x y", "{key}: |\n  text\n  more", "{key}: >\n  text", "{key}:", "{key}: ~",
    "{key}: ''", '{key}: "\\0"', '{key}: "\\uD800"', "{key}: 1\n{key}: 2", "3: 4",
    "true: 1", "[a]: 1", "? {{a: b}}\n: c",
    "- 1\n- 2", "text", "",
    "config: other.yaml", "help: true", "{key}: 1\n---\n{key}: 2", "{key}: [", "{key}: \t1", "\t{key}: 1", "{key}: @",
    "%TAG ! x\n---\n{key}: 1", "unknown-option: 1", "--{key}: 1", "no-{key}: true", "<<: {{{key}: 1}}", "{key}: 0o17",
    "{key}: 12:30:45", "{key}: 2024-01-01", "{key}: .inf", "{key}: .nan", "{key}: 1_000", "# nothing", "{key} 1",
    "{key}: [" * 200, "{key}: " + "x" * 300_000, "{key}: 1\r\n", "\ufeff{key}: 1", "{key}: \u2028", "...",
    "{key}: yes",
)  # fmt: skip


def options_of(parser: Any) -> list[Any]:
    """The options of a parser but ``--config`` and ``--help``; those of subcommands, too."""
    found = []
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            found += [one for name in ("losses",) for one in options_of(action.choices[name])]
        elif action.option_strings and not isinstance(action, _HelpAction) and action.dest != "config":
            found.append(action)
    return found


def value(action: Any, draw: random.Random) -> str:
    """A word for an option: often of its type, and seldom a good one."""
    if action.choices and draw.random() < 0.5:
        return str(draw.choice([*action.choices, "none of these"]))
    if action.type in (int, float) and draw.random() < 0.9:
        return draw.choice(INTEGERS if action.type is int else NUMBERS)
    if action.dest in ("split", "data_path") and draw.random() < 0.5:
        return draw.choice(WEIGHTS)
    return draw.choice(WORDS)


def line(base: Sequence[str], options: Sequence[Any], draw: random.Random) -> tuple[list[str], bool]:
    """A command line: ``base`` with one to three changes. Returns it, and whether no command may accept it."""
    words, never, moved = list(base), False, False
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        kind = draw.random()
        if kind < 0.8 and options:
            action = draw.choice(options)
            flag = draw.choice(action.option_strings)
            if isinstance(action, BooleanOptionalAction | _StoreTrueAction):
                words += [draw.choice((flag, flag, f"{flag}=true", f"{flag}=--"))]
                never |= "=" in words[-1]
                continue
            word = value(action, draw)
            never |= word in ("", "--") or (action.type in (int, float) and word in NEVER_A_NUMBER)
            many = [value(action, draw) for _ in range(draw.randrange(3))] if action.nargs else []
            words += [f"{flag}={word}"] if word.startswith("-") or draw.random() < 0.3 else [flag, word, *many]
        elif kind < 0.85:
            words.append(draw.choice(("--", "-x", "--unknown", "--unknown=1", "stray", "-", "")))
        elif kind < 0.9 and len(words) > 1:
            del words[draw.randrange(len(words))]
            moved = True
        elif kind < 0.95 and words:
            words.insert(draw.randrange(len(words)), draw.choice(words))
            moved = True
        else:
            place = draw.randrange(len(words) + 1)
            words[place:place] = [draw.choice(("--config", "--config=")), draw.choice(WORDS)]
    return words, never and not moved


def yaml_text(options: Sequence[Any], draw: random.Random) -> bytes:
    """A file for ``--config``: options with values, then perhaps one odd line, or a damaged byte."""
    lines = []
    for action in draw.sample(options, min(len(options), draw.randrange(4))):
        key = action.option_strings[0].lstrip("-")
        if draw.random() < 0.3:
            key = key.replace("-", "_")
        word = value(action, draw)
        lines.append(f"{key}: {draw.choice((word, json.dumps(word), repr(word)))}")
    if draw.random() < 0.7 and options:
        key = draw.choice(options).option_strings[0].lstrip("-")
        lines.insert(
            draw.randrange(len(lines) + 1),
            draw.choice(YAML_SHAPES).replace("{key}", key).replace("{{", "{").replace("}}", "}"),
        )
    content = "\n".join(lines).encode(errors="surrogateescape") + b"\n"
    if draw.random() < 0.2:
        place = draw.randrange(len(content))
        content = content[:place] + draw.randbytes(1) + content[place + 1 :]
    return content


def fixtures(folder: Path) -> None:
    """The files that base lines name, and files of every unusual kind."""
    from trainers.data.indexed_writer import IndexedDatasetWriter
    from trainers.data.tokenizer import Tokenizer
    from trainers.data.wordpiece import SPECIAL

    folder.mkdir(parents=True, exist_ok=True)
    text = "a text of some words, and of more words\n\nanother text\n" * 40
    (folder / "text.txt").write_text(text)
    rows = [{"text": f"{text} {number}", "id": number} for number in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tokenizer.json").write_bytes(Tokenizer.train_bpe([text], 280).to_bytes())
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", "##a"]) + "\n")
    with IndexedDatasetWriter(folder / "data", "u2") as writer:
        for number in range(30):
            writer.add_document([(number + n) % 100 for n in range(40)])
    (folder / "results").mkdir()
    row = {"operation": "all_reduce", "transport": "host", "group": "world", "ranks": 2, "dtype": "float32",
           "redop": "sum", "root": None, "in_place": True, "wrong": 0}  # fmt: skip
    points = [
        row | {"bytes": 2**n, "seconds": {"p50": (spent := 1e-6 * (5 + 2**n / 1e3))}, "algbw": 2**n / spent,
               "busbw": 2**n / spent}
        for n in range(3, 20)
    ]  # fmt: skip
    results = {"format": 1, "command": "x", "date": "y", "hardware": "z", "versions": {"python": "3"}, "rows": points}
    for path in (folder / "results.json", folder / "results" / "a.json"):
        path.write_text(json.dumps(results))
    (folder / "results" / "b.md").write_text("# A\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    shutil.copytree(mpirun.ROOT / "tests" / "bench" / "recordings" / "format-2", folder / "recording")
    (folder / "run.yaml").write_text("lr: 0.001\n")
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    with (folder / "huge").open("wb") as file:
        file.truncate(1 << 40)  # of zeros, without a block on the disk
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
