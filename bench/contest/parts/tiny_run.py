"""A few steps of a tiny model at one layout, and the digests of all that they compute."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from commengine import Communicator
from commengine.rank_zero import broadcast_json, gather_json
from tplayers import placements
from trainers.checkpoints import run_state
from trainers.checks.digests import tensor_sum, weights_digest
from trainers.data.corpus import open_corpus
from trainers.data.samples import ZipfSamples
from trainers.data.sentences.samples import ZipfSentences
from trainers.settings import derived
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.bert import BERTTask
from trainers.tasks.kinds import task_of
from trainers.training.trainer import Trainer

if TYPE_CHECKING:
    from mpi4py import MPI

#: seconds after which a collective that is not done ends the run. A rank of a group with a timeout yields its core
#: while it waits, as in every training run: otherwise sixteen ranks on two cores mostly wait for each other's turns
TIMEOUT = 600.0

#: samples of an epoch, so that runs go through several, and stop within one
EPOCH = 100

#: the settings of every tiny run: with dropout, clipping, warm-up and padding of the vocabulary. In fp16 the loss scale
#: begins so high, and grows so often, that some steps overflow and are skipped
SETTINGS: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 61, "lr": 1e-2,
    "make_vocab_size_divisible_by": 16, "mock_data": True, "global_batch_size": 16, "clip_grad": 0.5,
    "lr_warmup_iters": 2, "initial_loss_scale": 2.0**20, "loss_scale_window": 4, "hysteresis": 1, "device": "cpu",
    "hidden_dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip

#: the Llama family, with four heads of keys and values for eight of queries
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "num_query_groups": 4, "kv_channels": 8, "num_attention_heads": 8, "disable_bias_linear": True,
    "add_qkv_bias": True, "untie_embeddings_and_output_weights": True, "ffn_hidden_size": 64,
}  # fmt: skip

#: the Llama family with experts, some of which get no token of a sample
EXPERTS: dict[str, Any] = {
    **LLAMA, "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {"gpt": {}, "bert": {}, "llama": LLAMA, "experts": EXPERTS}
#: those of the whole grid
DENSE = ("gpt", "bert", "llama")
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}


@dataclass(frozen=True)
class RunLayout:
    """How a run is laid out: ``tensor`` times ``data`` ranks, and options that change no bit."""

    tensor: int
    data: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The ranks of the run."""
        return self.tensor * self.data * int(self.options.get("context_parallel_size", 1))

    def __str__(self) -> str:
        words = [f"TP {self.tensor}", f"DP {self.data}"]
        words += [
            name.replace("_", "-") + ("" if value is True else f" {value}") for name, value in self.options.items()
        ]
        return ", ".join(words)


#: steps that a run that is resumed elsewhere does after its last checkpoint, as one that is killed does: they are lost
LOST = 1

#: of the whole run, and of each tensor of its end
Digests = dict[str, Any]


def run(
    mpi: MPI.Intracomm, model: str, layout: RunLayout, *, precision: str = "fp32", steps: int = 3,
    deterministic: bool = True, resumed: tuple[RunLayout, int, Path] | None = None, **settings: Any,
) -> Digests:  # fmt: skip
    """Train ``model`` for ``steps`` steps on the ranks of ``mpi``, in groups of the layout's ranks, which do the same.

    Returns this group's digests: "steps" has the exact loss and norm of each step and the weights' digest after it;
    each further one is of a parameter, a master or a moment after the last step, by its name. The same on all ranks
    of the group; "replicas" is there if a rank had other steps than rank 0. resumed: the steps up to a number are done
    at another layout, and are saved into a folder; steps after that are lost. Collective over ``mpi``, of which the
    size is a multiple of both layouts' ranks.
    """
    if resumed is None:
        return _at_layout(mpi, model, layout, steps, deterministic, settings | PRECISIONS[precision])
    first, begun, folder = resumed
    fixed = settings | PRECISIONS[precision] | {"train_iters": steps}
    early = _at_layout(mpi, model, first, begun + LOST, deterministic, fixed, save=(folder, begun))
    late = _at_layout(mpi, model, layout, steps, deterministic, fixed, load=folder)
    return late | {"steps": early["steps"][:begun] + late["steps"]}


def _at_layout(
    mpi: MPI.Intracomm, model: str, layout: RunLayout, steps: int, deterministic: bool, settings: Mapping[str, Any], *,
    save: tuple[Path, int] | None = None, load: Path | None = None,
) -> Digests:  # fmt: skip
    group: Any = mpi.Split(mpi.rank // layout.ranks, mpi.rank)
    kind = BERTSettings if model == "bert" else GPTSettings
    given = {"train_iters": steps, **SETTINGS, **MODELS[model], **settings, **layout.options}
    if save is not None:
        given["save"] = str(save[0] / f"group{mpi.rank // layout.ranks}")
    if load is not None:
        given["load"] = str(load / "group0")
    config: Any = kind(**given, tensor_model_parallel_size=layout.tensor, deterministic=deterministic)
    with Communicator(group, order=derived.order(config), device="cpu", timeout=TIMEOUT) as world:
        require_valid(config, world.size)
        config = config if model == "bert" else task_of(config).completed(world.size)
        config = derived.with_canonical_sizes(config)
        with closing(_trainer(config, world)) as trainer:
            run_state.resume(trainer)
            digests: Digests = {"steps": []}
            while trainer.iteration < steps:
                step = trainer.step()
                trainer.optimizer.wait_for_parameters()
                of_weights = broadcast_json(trainer.grid.expert, weights_digest(trainer))
                digests["steps"].append([step.loss.hex(), step.norm.hex(), step.skipped, of_weights])
                if save is not None and trainer.iteration == save[1]:
                    run_state.CheckpointSaver(trainer).start(background=False)
            digests |= _of_tensors(trainer)
            found: Digests = broadcast_json(world, digests)
            alike = torch.tensor(found["steps"] == digests["steps"])
            world.all_reduce(alike, "min")
            if not alike:
                found["replicas"] = "differ"
    mpi.Barrier()
    group.Free()
    return found


def _trainer(config: Any, world: Communicator) -> Trainer:
    task = task_of(config)

    def mock(_: int, part: int) -> ZipfSamples | ZipfSentences:
        if isinstance(task, BERTTask):
            return ZipfSentences(task.wordpieces(), task.rules(), EPOCH, part)
        return ZipfSamples(config.vocab_size, config.seq_length, config.seed, EPOCH, split=part)

    return task.new_trainer(world, open_corpus(config, mock=mock))


def _of_tensors(trainer: Trainer) -> dict[str, int]:
    """The digests of the parameters, masters and moments, on rank 0. Collective over the world."""
    placed, found = placements(trainer.model), {}
    state = ((f"parameter.{name}", tensor) for name, tensor in trainer.model.named_parameters())
    for name, tensor in [*state, *trainer.optimizer.tensors()]:
        if trainer.grid.expert_replicas.rank:
            continue
        placement = placed[name.partition(".")[2]]
        total = torch.tensor([tensor_sum(tensor.detach(), placement)])
        if placement.sharded:
            trainer.grid.tensor.all_reduce(total)
        found[name] = int(total)
    return {name: number for part in gather_json(trainer.grid.expert, found) for name, number in part.items()}


def unlike(one: Digests, other: Digests) -> list[str]:
    """The names of the digests in which two runs differ."""
    return [name for name in one if one[name] != other.get(name)] + sorted(other.keys() - one.keys())
