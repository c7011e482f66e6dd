"""What travels to a machine without a network: pack it with ``bench/gpu-carry.sh``, install it with ``bench/gpu.sh``.

    python -m bench.gpu_study.carried split FILE FOLDER --piece-mib 54
    python -m bench.gpu_study.carried install CARRY SITE
    python -m bench.gpu_study.carried stand-in NAME FOLDER

A file that is too large for one transfer travels in pieces. The pieces, and a file with their SHA-256, are written by
``split``. ``install`` puts the wheels of CARRY/wheels into the folder SITE. It joins the pieces of CARRY/nccl, if all
are there, and puts their libnccl.so.2 into SITE/nccl. ``stand-in`` writes a tiny wheel, for
dry runs without an index. This module needs the standard library and pip only.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

NCCL = "libnccl.so.2"


class CarryError(RuntimeError):
    """A piece is missing or damaged, or a wheel does not install."""


def split(file: Path, folder: Path, piece: int) -> list[Path]:
    """Write ``file`` into ``folder`` as NAME.1of4 and so on, of ``piece`` bytes each, and NAME.sha256.

    Pieces of ``folder`` from an earlier call are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    data = file.read_bytes()
    count = max(1, -(-len(data) // piece))
    paths = []
    for number in range(count):
        paths.append(folder / f"{file.name}.{number + 1}of{count}")
        paths[-1].write_bytes(data[number * piece : (number + 1) * piece])
    (folder / f"{file.name}.sha256").write_text(hashlib.sha256(data).hexdigest() + "\n", encoding="utf-8")
    return paths


def join(folder: Path, target: Path) -> Path:
    """Join the pieces in ``folder`` into a file of their name in ``target``. Raises CarryError if one is missing."""
    sums = list(folder.glob("*.sha256"))
    if len(sums) != 1:
        raise CarryError(f"{folder}: has {len(sums)} files *.sha256; there must be one, as split writes it")
    name = sums[0].name.removesuffix(".sha256")
    pieces = {int(path.name.rpartition(".")[2].split("of")[0]): path for path in folder.glob(f"{name}.*of*")}
    count = int(next(iter(pieces.values())).name.rpartition("of")[2]) if pieces else 0
    missing = [number for number in range(1, max(count, 1) + 1) if number not in pieces]
    if missing:
        raise CarryError(f"{folder}: of {name}, these pieces are missing: {', '.join(map(str, missing))}")
    data = b"".join(pieces[number].read_bytes() for number in range(1, count + 1))
    if hashlib.sha256(data).hexdigest() != sums[0].read_text(encoding="utf-8").strip():
        raise CarryError(f"{folder}: the pieces of {name} do not have the SHA-256 that stands beside them")
    target.mkdir(parents=True, exist_ok=True)
    (target / name).write_bytes(data)
    return target / name


def install_wheels(wheels: Sequence[Path], site: Path) -> None:
    """Install ``wheels`` into ``site`` without an index, and their libraries into ``site``/lib."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--upgrade", "--target", str(site), *map(str, wheels)], check=False)
    if done.returncode:
        raise CarryError(f"pip ended with status {done.returncode}")
    for wheel in wheels:  # pip --target leaves a wheel's data/lib out, and libmpi is there
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                _, found, rest = name.partition(".data/data/lib/")
                if found and rest and not name.endswith("/"):
                    path = site / "lib" / rest
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))


def install_nccl(folder: Path, site: Path) -> Path:
    """Join the pieces in ``folder`` and put the NCCL library of that wheel into ``site``/nccl. Returns its path."""
    wheel = join(folder, site / "nccl")
    library = site / "nccl" / NCCL
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(f"/{NCCL}")]
        if len(names) != 1:
            raise CarryError(f"{wheel.name}: has {len(names)} files {NCCL}; there must be one")
        library.write_bytes(archive.read(names[0]))
    wheel.unlink()
    return library


def install(carry: Path, site: Path) -> None:
    """Install what ``carry`` holds. Prints a line for each part."""
    wheels = sorted((carry / "wheels").glob("*.whl"))
    if not wheels:
        raise CarryError(f"{carry / 'wheels'}: holds no wheels; bench/gpu-carry.sh gathers them")
    site.mkdir(parents=True, exist_ok=True)
    install_wheels(wheels, site)
    print("installed:", *(wheel.name for wheel in wheels))
    pieces = carry / "nccl"
    print("NCCL:", install_nccl(pieces, site) if pieces.is_dir() else "none was carried", flush=True)


def stand_in(name: str, folder: Path) -> Path:
    """Write a wheel of version 1.0 that has a command, a library and a libnccl.so.2, all of them texts."""
    plain = name.replace("-", "_")
    info = f"{plain}-1.0.dist-info"
    files = {
        f"{plain}_data/nccl/lib/{NCCL}": "no library",
        f"{plain}-1.0.data/data/bin/{name}": "#!/bin/sh\n",
        f"{plain}-1.0.data/data/lib/lib{plain}.so.1": "no library",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: commengine\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{plain}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def parser() -> argparse.ArgumentParser:
    """The command line: a verb and its arguments."""
    options = argparse.ArgumentParser("python -m bench.gpu_study.carried", description=__doc__, allow_abbrev=False)
    verbs = options.add_subparsers(dest="verb", required=True)
    cut = verbs.add_parser("split", help="write a file as pieces", allow_abbrev=False)
    cut.add_argument("file", type=Path)
    cut.add_argument("folder", type=Path)
    cut.add_argument("--piece-mib", type=float, default=54, help="size of a piece in MiB (default: %(default)s)")
    put = verbs.add_parser("install", help="install what was carried", allow_abbrev=False)
    put.add_argument("carry", type=Path)
    put.add_argument("site", type=Path)
    made = verbs.add_parser("stand-in", help="write a tiny wheel", allow_abbrev=False)
    made.add_argument("name")
    made.add_argument("folder", type=Path)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the verb says. Returns the exit status."""
    given = parser().parse_args(argv)
    try:
        if given.verb == "split":
            print(*split(given.file, given.folder, max(1, int(given.piece_mib * 2**20))), sep="\n")
        elif given.verb == "install":
            install(given.carry, given.site)
        else:
            print(stand_in(given.name, given.folder))
    except (CarryError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
