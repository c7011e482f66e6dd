"""The table of commands: each is there under one name, and no command of a package is left out."""

import importlib.util
import re
from pathlib import Path

import commengine
from commengine.command.table import COMMANDS, GROUPS, command_of, of_package

TOP = Path(commengine.__file__).parent.parent
#: packages whose modules with a ``__main__`` block are commands
OF_COMMANDS = ("bench", "trainers")


def modules(package):
    """The modules of a package, and its folders, that ``python -m`` runs."""
    folder = TOP / package
    files = [path for path in folder.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    found = {f"{package}.{path.stem}" for path in files if path.stem != "__main__"}
    return found | {f"{package}.{path.parent.name}" for path in folder.glob("*/__main__.py")}


def test_every_command_of_a_package_is_listed_once():
    for package in OF_COMMANDS:
        listed = [one.module for one in of_package(package)]
        assert sorted(listed) == sorted(modules(package))
    assert len(COMMANDS) == sum(map(len, GROUPS.values()))
    assert {one.module for one in COMMANDS.values()} >= {"bench.doctor", "trainers.pretrain_gpt", "commengine.rollcall"}
    assert all(importlib.util.find_spec(one.module) for one in of_package("commengine"))


def test_words_have_dashes_and_lines_fit_a_wide_terminal():
    for words, one in COMMANDS.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*( [a-z0-9]+)?", words) and words == one.words
        assert len(one.line) <= 100 and one.line == one.line.strip() and not one.line.endswith(".")


def test_a_command_is_found_from_its_first_words():
    assert command_of(["train", "gpt", "--bf16"]) is COMMANDS["train gpt"]
    assert command_of(["doctor", "train", "gpt"]) is COMMANDS["doctor"]
    assert command_of(["train"]) is command_of(["gpt"]) is command_of([]) is None
