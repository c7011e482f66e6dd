"""The command lines of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import configargparse

PLOTS = (".png", ".svg", ".pdf")


def new_parser(command: str, description: str | None) -> Any:
    """A parser of ``python -m COMMAND``'s options, which may also stand in a YAML file."""
    return configargparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=configargparse.RawDescriptionHelpFormatter,
        config_file_parser_class=configargparse.YAMLConfigFileParser,
        allow_abbrev=False,
    )


def check_writable(plot: str | Path | None = None, **files: str | Path | None) -> None:
    """Raise ValueError for a file that could not be written after the measurement. By the names of the options."""
    for name, file in {**files, "plot": plot}.items():
        if file is not None and not Path(file).parent.is_dir():
            raise ValueError(f"--{name} {file}: there is no folder {Path(file).parent}")
        if file is not None and Path(file).is_dir():
            raise ValueError(f"--{name} {file}: is a folder, not a file")
    if plot is not None and Path(plot).suffix not in PLOTS:
        raise ValueError(f"--plot {plot}: the name ends in {', '.join(PLOTS[:-1])} or {PLOTS[-1]}")
