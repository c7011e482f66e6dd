"""Read a machine for bench.predict: a device, nodes of devices, and links, from a YAML file here or anywhere else.

Rates are in the units of data sheets (TFLOP/s, GB/s of 1e9, us) and become SI units here. A file needs every key of
the example, bench/clusters/dgx-2h.yaml, except ``calibration``, ``fitted``, ``measured``, ``source``, and of the device
``gemm_start_us`` and ``attention_efficiency``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, WrapValidator

from commengine import UsageError
from commengine.cost import FittedModel, Link, Machine
from commengine.files.reading import InputFileError, require_regular
from commengine.files.schema import FilePart, checked
from commengine.files.yaml_files import read_yaml
from tplayers.formulas import TransformerShape, model_flops

FOLDER = Path(__file__).parent
# FlashAttention-2 on an A100 reaches up to 73% of peak forward and 63% backward (Dao 2023), and less at usual lengths.
FUSED_ATTENTION = (0.6, 0.5)

#: the name of the user's own machine, and its file, which the command writes into the user's folder
OWN, OWN_FILE = "this-machine", "this-machine.yaml"
MEASURE = "python -m bench.predict --measure"
OWN_COMMAND = f"{MEASURE} --output {OWN_FILE}"


_Tera = Annotated[float, Field(gt=0), AfterValidator(lambda value: value * 1e12)]
_Giga = Annotated[float, Field(gt=0), AfterValidator(lambda value: value * 1e9)]
_Micro = Annotated[float, Field(ge=0), AfterValidator(lambda value: value / 1e6)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Count = Annotated[int, Field(ge=1)]


class Device(FilePart):
    """One GPU, or one core of a host. Units are bytes, seconds and FLOP/s; those of the file are in the aliases.

    gemm_efficiency: the share of peak_flops that the largest GEMMs reach. tiles: the output tiles (rows, columns) that
    a GEMM may use, one at a time on each unit (SM). cache_bandwidth: the rate at which all units together read from
    the last cache. memory_efficiency: the share of memory_bandwidth that a plain kernel reaches. layernorm_efficiency:
    the same for LayerNorm, forward and backward. gemm_start: seconds of a GEMM beside those of its FLOPs.
    attention_efficiency: the share of peak_flops that fused attention reaches, forward and backward. latency: of a
    first read from memory. launch: between two kernels in a stream. dispatch: the host's time to issue a kernel.
    random_state: the time to save and restore the generator of dropout once, during which the device waits. kernels: of
    2019, of today, or of 2021, whose attention keeps its scores.
    """

    name: str
    peak_flops: _Tera = Field(alias="peak_tflops")
    gemm_efficiency: _Share
    units: _Count
    tiles: Annotated[tuple[tuple[_Count, _Count], ...], Field(min_length=1)]
    cache_bandwidth: _Giga = Field(alias="cache_gb_per_s")
    memory_bytes: _Giga = Field(alias="memory_gb")
    memory_bandwidth: _Giga = Field(alias="memory_gb_per_s")
    memory_efficiency: _Share
    layernorm_efficiency: tuple[_Share, _Share]
    latency: _Micro = Field(alias="latency_us")
    launch: _Micro = Field(alias="launch_us")
    dispatch: _Micro = Field(alias="dispatch_us")
    random_state: _Micro = Field(alias="random_state_us")
    element_bytes: Literal[2, 4]
    kernels: Literal["unfused", "fused", "fused_softmax"]
    gemm_start: _Micro = Field(default=0.0, alias="gemm_start_us")
    attention_efficiency: tuple[_Share, _Share] = FUSED_ATTENTION


class _LinkPart(FilePart):
    alpha_us: _Micro
    gb_per_s: _Giga
    fitted: str | None = None

    def link(self) -> Link:
        return Link(self.alpha_us, 1 / self.gb_per_s)


class _NodePart(FilePart):
    ranks: _Count
    nics: _Count


class _ShapePart(FilePart):
    num_layers: _Count
    hidden_size: _Count
    num_attention_heads: _Count
    seq_length: _Count
    padded_vocab_size: _Count


def _name_or_sizes(value: Any, sizes: Any) -> Any:
    return value if isinstance(value, str) else sizes(value)


class _CalibrationPart(FilePart):
    model: Annotated[_ShapePart, WrapValidator(_name_or_sizes)]
    micro_batch_size: _Count
    recompute: Literal["none", "selective", "full"]
    tflops: _Tera | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None


class _MeasuredPart(FilePart):
    members_per_node: _Count
    groups_per_node: _Count
    fitted: str


class _File(FilePart):
    name: str
    device: Device
    node: _NodePart
    inside: _LinkPart
    between: _LinkPart
    collective_base_us: _Micro
    overlap: bool
    calibration: _CalibrationPart | None = None
    measured: list[_MeasuredPart] = Field(default_factory=list)
    source: JsonValue = None


@dataclass(frozen=True)
class Calibration:
    """One measured step, and its FLOP/s on a device, with recomputed ones. Predictions are scaled to meet it.

    model: a name of `bench.prediction.layout.MODELS`, or the shape itself.
    """

    model: str | TransformerShape
    micro_batch: int
    recompute: str
    flops: float


@dataclass(frozen=True)
class Cluster:
    """Devices, links, and the habits of the software.

    base: the time of a collective before its first message. overlap: gradients are reduced while backward runs.
    fitted: a measured model of collectives inside a node, in place of the link's alpha and beta. measured: such models
    by how groups lie: (members of a group on a node, groups that run at once on a node). They come before all else.
    """

    name: str
    device: Device
    machine: Machine
    base: float
    overlap: bool
    calibration: Calibration | None
    fitted: FittedModel | None
    measured: Mapping[tuple[int, int], FittedModel] = field(default_factory=dict)


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
        return _cluster(checked(_File, data), path)
    except ValueError as error:
        raise UsageError(f"--cluster {path}: {error}") from error


def _cluster(file: _File, path: Path) -> Cluster:
    def fitted(name: str) -> FittedModel:
        return FittedModel.load(require_regular(path.parent / name))

    rows: dict[tuple[int, int], dict[str, list[Any]]] = {}
    for number, row in enumerate(file.measured):
        place = row.members_per_node, row.groups_per_node
        if math.prod(place) > file.node.ranks:
            raise ValueError(
                f"measured[{number}]: {place[1]} groups of {place[0]} members need more than {file.node.ranks} ranks"
            )
        for operation, segments in fitted(row.fitted).to_json()["collectives"].items():
            rows.setdefault(place, {}).setdefault(operation, []).extend(segments)
    return Cluster(
        name=file.name,
        device=file.device,
        machine=Machine(file.inside.link(), file.between.link(), file.node.ranks, file.node.nics),
        base=file.collective_base_us,
        overlap=file.overlap,
        calibration=_calibration(file.calibration) if file.calibration else None,
        fitted=fitted(file.inside.fitted) if file.inside.fitted else None,
        measured={place: FittedModel.from_json({"collectives": one}) for place, one in rows.items()},
    )


def _calibration(given: _CalibrationPart) -> Calibration:
    model: TransformerShape | str | _ShapePart = given.model
    if (given.tflops is None) == isinstance(model, str) or (given.seconds is None) == isinstance(model, _ShapePart):
        raise ValueError("calibration: a model that is named needs tflops, and one of sizes seconds")
    flops = given.tflops or 0.0
    if isinstance(model, _ShapePart):
        model = TransformerShape(*model.model_dump().values())
        flops = model_flops(model, given.micro_batch_size, given.recompute) / (given.seconds or 1.0)
    return Calibration(model, given.micro_batch_size, given.recompute, flops)
