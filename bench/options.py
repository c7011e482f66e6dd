"""The command lines of the studies."""

from __future__ import annotations

from typing import Any

import configargparse


def new_parser(command: str, description: str | None) -> Any:
    """A parser of ``python -m COMMAND``'s options, which may also stand in a YAML file."""
    return configargparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=configargparse.RawDescriptionHelpFormatter,
        config_file_parser_class=configargparse.YAMLConfigFileParser,
        allow_abbrev=False,
    )
