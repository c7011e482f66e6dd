"""The folder of a study: its settings, what is finished, and the seconds that it took; read and written by rank 0."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.command.files import replace_json
from commengine import UsageError
from commengine.files.reading import InputFileError, read_json
from commengine.options.declared import make_writable

FORMAT = 1
#: what a study writes into its folder
FILES = (
    "study.json", "study.md", "report.html",
    *(f"{name}.{kind}" for name in ("collectives", "model", "step", "replay") for kind in ("json", "md", "png")),
)  # fmt: skip
RECORDING = "steps"


@dataclass
class StudyRecord:
    """The contents of study.json.

    settings: those that a study cannot change. finished: the parts that need not run again. title, about, answers: the
    page's first screen (`bench.report_page.page`).
    """

    settings: dict[str, Any]
    spent_s: float = 0.0
    finished: list[str] = field(default_factory=list)
    title: str = ""
    about: str = ""
    answers: list[dict[str, str]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


def open_record(folder: Path, settings: dict[str, Any], *, overwrite: bool) -> StudyRecord:
    """The study in ``folder``, or a new one. Raises UsageError for a folder with other files or other settings."""
    make_writable("DIR", folder)
    older = folder / "study.json"
    if overwrite:
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / RECORDING, ignore_errors=True)
    elif older.exists():
        found = read_file(older)
        names = StudyRecord.__dataclass_fields__
        about = (found.get("kind"), found.get("format")) if isinstance(found, dict) else None
        if about != ("study", FORMAT) or not names.keys() <= found.keys():
            raise UsageError(
                f"DIR {folder}: study.json is not of this version; give another folder, or --overwrite to begin anew"
            )
        record = StudyRecord(**{name: found[name] for name in names})
        if changed := [name for name in settings if record.settings.get(name) != settings[name]]:
            before, now = record.settings.get(changed[0]), settings[changed[0]]
            raise UsageError(
                f"DIR {folder}: holds a study with other settings ({changed[0]} {before}, now {now}); give another "
                "folder, or --overwrite"
            )
        return record
    if strange := sorted(path.name for path in folder.iterdir()):
        raise UsageError(f"DIR {folder}: holds {strange[0]}, and no study; give a new folder, or an empty one")
    return StudyRecord(settings)


def read_file(path: Path) -> Any:
    """The contents of a JSON file of a study. Raises UsageError for a file that cannot be read."""
    try:
        return read_json(path)
    except InputFileError as error:
        raise UsageError(f"DIR: {error}; give --overwrite to begin anew") from error


def save(folder: Path, record: StudyRecord) -> None:
    """Write study.json, all of it or nothing."""
    replace_json(folder / "study.json", {"format": FORMAT, "kind": "study"} | asdict(record))
