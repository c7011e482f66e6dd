"""Flags, and a YAML file of the same names."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from typing import Any, NoReturn

import configargparse


class OptionError(ValueError):
    """What is wrong with a command line, in one line."""


class Parser(configargparse.ArgumentParser):
    """An argument parser with ``--config FILE`` that raises `OptionError` instead of printing and exiting."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(config_file_parser_class=configargparse.YAMLConfigFileParser, allow_abbrev=False, **settings)
        self.add_argument("--config", is_config_file=True, metavar="FILE", help="YAML file of these options; flags win")

    def error(self, message: str) -> NoReturn:
        words = " ".join(message.split())
        raise OptionError(f"--config: {words}" if "config file" in words and "--config" not in words else words)

    def get_possible_config_keys(self, action: Any) -> list[str]:
        keys: list[str] = super().get_possible_config_keys(action)
        return [*keys, *(key.replace("-", "_") for key in keys if "-" in key.lstrip("-") and not key.startswith("-"))]

    def convert_item_to_command_line_arg(self, action: Any, key: str, value: Any) -> list[str]:
        # ConfigArgParse takes the value of "no-overlap-grad-reduce" for that of "overlap-grad-reduce".
        if isinstance(action, BooleanOptionalAction) and key.lstrip("-").startswith(("no-", "no_")):
            self.error(f"{key}: in a file, write {action.option_strings[0].lstrip('-')}: true or false")
        arguments: list[str] = super().convert_item_to_command_line_arg(action, key, value)
        return arguments
