"""Command lines: flags and a YAML file of the same names, read by rank 0, with one error for all ranks."""

from __future__ import annotations

import json
import sys
from argparse import BooleanOptionalAction
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import configargparse
import torch

from commengine import Communicator, UsageError

T = TypeVar("T")


class Parser(configargparse.ArgumentParser):
    """An argument parser that raises `UsageError` instead of printing and exiting."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(config_file_parser_class=configargparse.YAMLConfigFileParser, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(" ".join(message.split()))

    def convert_item_to_command_line_arg(self, action: Any, key: str, value: Any) -> list[str]:
        # ConfigArgParse takes the value of "no-overlap-grad-reduce" for that of "overlap-grad-reduce".
        if isinstance(action, BooleanOptionalAction) and key.lstrip("-").startswith("no-"):
            self.error(f"{key}: in a file, write {action.option_strings[0].lstrip('-')}: true or false")
        arguments: list[str] = super().convert_item_to_command_line_arg(action, key, value)
        return arguments


def broadcast_json(world: Communicator, value: Any) -> Any:
    """Rank 0's ``value``, which JSON can hold, on every rank. Collective."""
    encoded = json.dumps(value).encode() if world.rank == 0 else b""
    return json.loads(_broadcast_bytes(world, encoded, 0))


def _broadcast_bytes(world: Communicator, mine: bytes, root: int) -> bytes:
    length = torch.tensor([len(mine)])
    world.broadcast(length, root)
    data = torch.zeros(int(length), dtype=torch.uint8)
    if world.rank == root and mine:
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    world.broadcast(data, root)
    return bytes(data.numpy())


def on_rank_zero(world: Communicator, work: Callable[[], Any]) -> Any:
    """Run ``work()`` on rank 0 and give its JSON result to all. Collective.

    What rank 0 raises as `UsageError`, ValueError or OSError becomes one `UsageError` on every rank; a SystemExit
    (--help) ends all ranks with its code.
    """
    outcome: dict[str, Any] = {}
    if world.rank == 0:
        try:
            outcome = {"result": work()}
        except (UsageError, ValueError, OSError) as error:
            outcome = {"error": str(error)}
        except SystemExit as stop:
            outcome = {"exit": stop.code if isinstance(stop.code, int) else 0}
    outcome = broadcast_json(world, outcome)
    if "error" in outcome:
        raise UsageError(outcome["error"])
    if "exit" in outcome:
        sys.exit(outcome["exit"])
    return outcome["result"]


def on_every_rank(world: Communicator, work: Callable[[], T]) -> T:
    """Run ``work()`` on every rank. Collective.

    If it raises `UsageError`, ValueError or OSError anywhere, all ranks raise `UsageError`, with the words of the
    first rank that failed. ``work`` must not communicate.
    """
    problem = ""
    try:
        result = work()
    except (UsageError, ValueError, OSError) as error:
        problem = str(error) or repr(error)
    ranks = torch.tensor([world.rank if problem else world.size])
    world.all_reduce(ranks, "min")
    first = int(ranks)
    if first < world.size:
        raise UsageError(_broadcast_bytes(world, problem.encode(), first).decode())
    return result
