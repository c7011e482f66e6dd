"""The table: an answer to every flag that Megatron-LM has had, in every command, and the page that is made of it."""

import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from commengine.options.declared import parser_of
from tests.support.mpirun import ROOT
from trainers.finetuning.completing import COMMAND as FINETUNE
from trainers.megatron_flags.answers import COMMANDS
from trainers.megatron_flags.table import TABLE, answers
from trainers.tasks.commands import PRETRAIN

KINDS: dict[str, Any] = {**PRETRAIN, "finetune": FINETUNE}
#: a flag a line: name; 0, 1, + for several words, ? for none in some versions; defaults, the newest one last. Facts of
#: arguments.py, and of the classes it builds on, in 24 versions of Megatron-LM from March 2019 to August 2026
THEIRS = {
    name: (words, defaults)
    for name, words, *defaults in map(
        str.split, Path(__file__).with_name("flags.txt").read_text(encoding="utf-8").splitlines()
    )
}
#: Megatron-LM sets these after it has read its flags
SET_LATER = {"--dataloader-type": "single", "--model-parallel-size": "1"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_megatron_has_an_answer_of_its_words(command: str) -> None:
    own, table = parser_of(KINDS[command].settings, "x")._option_string_actions, answers(command)
    assert len(THEIRS) > 980
    assert [name for name in THEIRS if name not in own and name not in table] == []
    assert [name for name in table if name in own or name not in THEIRS] == []
    for name, (_, flag) in table.items():
        words, defaults = THEIRS[name]
        assert str(flag.words) == {"+": "2", "?": "2"}.get(words, words), name
        same = [*defaults, SET_LATER.get(name)]
        assert flag.default is None or flag.default in same or float(flag.default) in map(float, defaults), name


@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_is_given_once_and_names_flags_that_are_here(command: str) -> None:
    assert KINDS[command].megatron == command
    parser = parser_of(KINDS[command].settings, "x")
    of_command = [one for some in TABLE.values() for one in some if command in one.commands]
    names = [flag.name for one in of_command for flag in one.flags]
    assert len(names) == len(set(names))
    for one in of_command:
        if one.kind == "same":
            target, *values = one.text.split(" ")
            action = parser._option_string_actions[target]
            assert all(value in (action.choices or values) for value in values)
            assert values or all((flag.words == 0) == (action.nargs == 0) for flag in one.flags), target
        assert (one.kind == "set") == (one.work is not None)


def test_the_page_is_the_table() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "megatron_flags.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == "\n".join(script["page"]()) + "\n", "run: python docs/megatron_flags.py"
    shown = {name for command in COMMANDS for name in answers(command)}
    assert [name for name in shown if f"`{name}`" not in page] == []


def test_names_of_fields_are_those_of_flags() -> None:
    """`Difference` and the notes of a run derive a flag from its field."""
    assert [one.name for kind in KINDS.values() for one in fields(kind.settings) if one.name.endswith("_")] == []
