"""Read a machine for bench.predict: a device, nodes of devices, and links, from a YAML file here or anywhere else.

Rates are in the units of data sheets (TFLOP/s, GB/s of 1e9, us) and become SI units here. A file needs every key of
the example, bench/clusters/dgx-2h.yaml, except ``calibration``, ``fitted`` and ``source``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commengine import UsageError
from commengine.cost import FittedModel, Link, Machine
from trainers.files.reading import InputFileError, read_yaml, require_regular

FOLDER = Path(__file__).parent
KERNELS = ("unfused", "fused")

#: the name of the user's own machine, and its file, which the command writes into the user's folder
OWN, OWN_FILE = "this-machine", "this-machine.yaml"
OWN_COMMAND = f"python -m bench.this_machine --output {OWN_FILE}"


@dataclass(frozen=True)
class Device:
    """One GPU, or one core of a host. Units are bytes, seconds and FLOP/s.

    gemm_efficiency: the share of peak_flops that the largest GEMMs reach. tiles: the output tiles (rows, columns) that
    a GEMM may use, one at a time on each unit (SM). cache_bandwidth: the rate at which all units together read from
    the last cache. memory_efficiency: the share of memory_bandwidth that a plain kernel reaches. layernorm_efficiency:
    the same for LayerNorm, forward and backward. latency: of a first read from memory. launch: between two kernels in
    a stream. dispatch: the host's time to issue a kernel. random_state: the time to save and restore the generator of
    dropout once, during which the device waits.
    """

    name: str
    peak_flops: float
    gemm_efficiency: float
    units: int
    tiles: tuple[tuple[int, int], ...]
    cache_bandwidth: float
    memory_bytes: float
    memory_bandwidth: float
    memory_efficiency: float
    layernorm_efficiency: tuple[float, float]
    latency: float
    launch: float
    dispatch: float
    random_state: float
    element_bytes: int
    kernels: str


@dataclass(frozen=True)
class Calibration:
    """One measured step, and its FLOP/s on a device, with recomputed ones. Predictions are scaled to meet it."""

    model: str
    micro_batch: int
    recompute: str
    flops: float


@dataclass(frozen=True)
class Cluster:
    """Devices, links, and the habits of the software.

    base: the time of a collective before its first message. overlap: gradients are reduced while backward runs.
    fitted: a measured model of collectives inside a node, in place of the link's alpha and beta.
    """

    name: str
    device: Device
    machine: Machine
    base: float
    overlap: bool
    calibration: Calibration | None
    fitted: FittedModel | None


def names() -> list[str]:
    """The names of the clusters in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Cluster:
    """A cluster of this folder, by its name, or one of any file; OWN is OWN_FILE in the working directory.

    Raises UsageError that names the file and the key at fault, or the command that writes OWN_FILE.
    """
    if name == OWN and not Path(OWN_FILE).exists():
        raise UsageError(f"--cluster {OWN}: there is no {OWN_FILE} in this folder; make it with: {OWN_COMMAND}")
    path = FOLDER / f"{name}.yaml" if name in names() else Path(OWN_FILE if name == OWN else name)
    try:
        data = read_yaml(path)
    except InputFileError as error:
        other = "" if path.is_file() else f"; neither a file nor one of {', '.join([*names(), OWN])}"
        raise UsageError(f"--cluster {error}{other}") from error
    try:
        return _cluster(_Section(data, ""), path)
    except ValueError as error:
        raise UsageError(f"--cluster {path}: {error}") from error


def _cluster(top: _Section, path: Path) -> Cluster:
    device, node, inside, between = (top.section(key) for key in ("device", "node", "inside", "between"))
    calibration = top.section("calibration") if "calibration" in top.data else None
    fitted = inside.data.pop("fitted", None)
    cluster = Cluster(
        name=top.text("name"),
        device=_device(device),
        machine=Machine(
            inside=Link(inside.number("alpha_us") / 1e6, 1 / (inside.number("gb_per_s", above=0) * 1e9)),
            between=Link(between.number("alpha_us") / 1e6, 1 / (between.number("gb_per_s", above=0) * 1e9)),
            ranks_per_node=node.integer("ranks"),
            nics_per_node=node.integer("nics"),
        ),
        base=top.number("collective_base_us") / 1e6,
        overlap=top.boolean("overlap"),
        calibration=_calibration(calibration) if calibration else None,
        fitted=FittedModel.load(require_regular(path.parent / str(fitted))) if fitted else None,
    )
    top.data.pop("source", None)
    for section in filter(None, (top, device, node, inside, between, calibration)):
        section.done()
    return cluster


def _calibration(section: _Section) -> Calibration:
    return Calibration(
        model=section.text("model"),
        micro_batch=section.integer("micro_batch_size"),
        recompute=section.text("recompute", among=("none", "selective", "full")),
        flops=section.number("tflops", above=0) * 1e12,
    )


def _device(section: _Section) -> Device:
    fraction = {"above": 0.0, "most": 1.0}
    forward, backward = section.numbers("layernorm_efficiency", 2, **fraction)
    tiles = section.take("tiles")
    good = isinstance(tiles, list) and tiles and all(isinstance(tile, list) and len(tile) == 2 for tile in tiles)
    if not good or not all(isinstance(side, int) and side > 0 for tile in tiles for side in tile):
        raise ValueError(f"device.tiles is a list of [rows, columns], not {tiles}")
    return Device(
        name=section.text("name"),
        peak_flops=section.number("peak_tflops", above=0) * 1e12,
        gemm_efficiency=section.number("gemm_efficiency", **fraction),
        units=section.integer("units"),
        tiles=tuple((tile[0], tile[1]) for tile in tiles),
        cache_bandwidth=section.number("cache_gb_per_s", above=0) * 1e9,
        memory_bytes=section.number("memory_gb", above=0) * 1e9,
        memory_bandwidth=section.number("memory_gb_per_s", above=0) * 1e9,
        memory_efficiency=section.number("memory_efficiency", **fraction),
        layernorm_efficiency=(forward, backward),
        latency=section.number("latency_us") / 1e6,
        launch=section.number("launch_us") / 1e6,
        dispatch=section.number("dispatch_us") / 1e6,
        random_state=section.number("random_state_us") / 1e6,
        element_bytes=section.integer("element_bytes"),
        kernels=section.text("kernels", among=KERNELS),
    )


class _Section:
    """A mapping in the file. Its keys are taken one by one; a key that is left at the end is unknown."""

    def __init__(self, data: Any, name: str) -> None:
        if not isinstance(data, Mapping):
            raise ValueError(f"{name or 'the file'} is not a mapping of keys to values")
        self.data = dict(data)
        self.name = name

    def take(self, key: str) -> Any:
        if key not in self.data:
            raise ValueError(f"{self._full(key)} is missing")
        return self.data.pop(key)

    def section(self, key: str) -> _Section:
        return _Section(self.take(key), self._full(key))

    def text(self, key: str, among: tuple[str, ...] = ()) -> str:
        value = self.take(key)
        if not isinstance(value, str) or (among and value not in among):
            raise ValueError(f"{self._full(key)}={value!r}: {'one of ' + ', '.join(among) if among else 'a text'}")
        return value

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise ValueError(f"{self._full(key)}={value!r}: true or false")
        return value

    def number(self, key: str, above: float = -1.0, most: float = float("inf")) -> float:
        return self._checked(key, self.take(key), above, most)

    def numbers(self, key: str, count: int, above: float = -1.0, most: float = float("inf")) -> list[float]:
        values = self.take(key)
        if not isinstance(values, list) or len(values) != count:
            raise ValueError(f"{self._full(key)}={values!r}: a list of {count} numbers")
        return [self._checked(key, value, above, most) for value in values]

    def integer(self, key: str) -> int:
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self._full(key)}={value!r}: a whole number, at least 1")
        return value

    def done(self) -> None:
        if self.data:
            raise ValueError(f"unknown: {', '.join(self._full(str(key)) for key in self.data)}")

    def _checked(self, key: str, value: Any, above: float, most: float) -> float:
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        if not valid or not max(0.0, above) <= value <= most or value == above:
            bound = f"above {above:g}" if above >= 0 else "0 or more"
            raise ValueError(
                f"{self._full(key)}={value!r}: a number, {bound}{f', at most {most:g}' if most < 2 else ''}"
            )
        return float(value)

    def _full(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key
