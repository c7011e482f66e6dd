"""Prompts: from a command line or a file to tokens that fit into the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commengine import UsageError
from trainers.data import text_files
from trainers.data.tokenizer import Tokenizer
from trainers.files.reading import InputFileError

#: the key of a prompt in a file of JSON lines
KEY = "prompt"


class Prompt(NamedTuple):
    """A text that the model continues. where: the option, or the file and the line, that it came from."""

    where: str
    text: str


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file, at least one.

    A file whose name ends in .jsonl or .json has an object with text under "prompt" in each line; any other file has
    one prompt in each line. Blank lines are left out. Raises ValueError that names the file, and the line if one is at
    fault, and OSError.
    """
    found = [Prompt(where, text) for where, text in text_files.read_lines(path, KEY)]
    if not found:
        raise InputFileError(f"{path}: holds no prompt; want one in each line")
    return found


def encoded(prompts: Sequence[Prompt], tokenizer: Tokenizer, positions: int) -> list[list[int]]:
    """The tokens of each prompt. Raises UsageError for one without a token, or with more than ``positions``."""
    found = []
    for prompt in prompts:
        tokens = tokenizer.encode(prompt.text)
        if not tokens:
            raise UsageError(f"{prompt.where}: holds no token; a prompt has at least one")
        if len(tokens) > positions:
            raise UsageError(
                f"{prompt.where}: has {len(tokens)} tokens; the model knows {positions} positions, and a prompt has "
                "at most one token for each"
            )
        found.append(tokens)
    return found
