"""The training step of `trainers.training.trainer.Trainer`, as a contestant of ``bench.contest step``.

The trainer, its optimizer, its reduction of gradients and its models are those that pretrain_gpt and pretrain_bert run.
The task gives the weights and the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from safetensors.torch import load_file

from bench.programs.step_task import StepTask
from commengine import Communicator
from tplayers import BERT, GPT, placements
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.settings.rules import require_valid
from trainers.tasks.bert import BERTMicrobatch
from trainers.tasks.gpt import TokenMicrobatch
from trainers.tasks.kinds import task_of
from trainers.tasks.training import new_model
from trainers.training.trainer import Trainer

#: parts of the reference state's names -> ours
NAMES = {
    "wte.weight": "embedding.weight", "wpe.weight": "position_embedding", "ln_f.": "final_norm.", "h.": "layers.",
    ".ln_1.": ".attention_norm.", ".ln_2.": ".mlp_norm.", ".attn.c_attn.": ".attention.qkv.",
    ".attn.c_proj.": ".attention.projection.", ".mlp.c_fc.": ".mlp.up.", ".mlp.c_proj.": ".mlp.down.",
    "wtt.weight": "token_type_embedding", "transform.dense.": "mlm_head.dense.", "transform.ln.": "mlm_head.norm.",
    "head.bias": "mlm_head.bias", "order.": "order_head.",
}  # fmt: skip


class TaskBatches:
    """The batch of a `StepTask`, the same at every step. A `trainers.training.interfaces.BatchSource`.

    data: the data group, each of whose ranks gets its part of the rows.
    """

    unusable = "a token of the task lies outside its vocabulary"

    def __init__(self, task: StepTask, data: Communicator) -> None:
        self.size = task.global_batch_size
        mine = self.size // data.size
        numbers = range(data.rank * mine, (data.rank + 1) * mine)
        part = slice(numbers.start, numbers.stop)
        make = _bert_microbatch if task.model == "bert" else _gpt_microbatch
        self._batch = make(task, part, tuple(numbers))

    def __call__(self, k: int) -> Sequence[TokenMicrobatch | BERTMicrobatch]:
        """This rank's only microbatch of global batch ``k``."""
        return [self._batch]


def _gpt_microbatch(task: StepTask, part: slice, numbers: tuple[int, ...]) -> TokenMicrobatch:
    rows = torch.from_numpy(task.tokens())[part]
    return TokenMicrobatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), numbers, task.vocab_size)


def _bert_microbatch(task: StepTask, part: slice, numbers: tuple[int, ...]) -> BERTMicrobatch:
    whole = (torch.from_numpy(array[part]) for array in task.bert_batch())
    tokens, types, lengths, labels, order, positions = whole
    if not task.masked_positions_only:
        return BERTMicrobatch(tokens, types, lengths, labels, order, None, numbers, task.vocab_size)
    of_masked = labels.gather(1, positions)
    return BERTMicrobatch(tokens, types, lengths, of_masked, order, positions, numbers, task.vocab_size)


def config_of(task: StepTask, ranks: int, tensor: int, *, overlap: bool) -> GPTSettings | BERTSettings:
    """The settings with which the training command would run the task's steps.

    Raises UsageError where ``ranks`` cannot.
    """
    of_model: type[GPTSettings | BERTSettings] = BERTSettings if task.model == "bert" else GPTSettings
    config = of_model(
        num_layers=task.num_layers, hidden_size=task.hidden_size, num_attention_heads=task.num_attention_heads,
        seq_length=task.seq_length, vocab_size=task.vocab_size, make_vocab_size_divisible_by=1, mock_data=True,
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tensor,
        global_batch_size=task.global_batch_size, micro_batch_size=task.global_batch_size * tensor // ranks,
        lr=task.lr, min_lr=0.0, lr_decay_style="constant", weight_decay=task.weight_decay, clip_grad=task.clip_grad,
        overlap_grad_reduce=overlap,
    )  # fmt: skip
    require_valid(config, ranks)
    return config


def load(model: GPT | BERT, path: str) -> None:
    """Fill ``model`` with this rank's parts of the reference state."""
    renamed = {}
    for name, tensor in load_file(path).items():
        for theirs, ours in NAMES.items():
            name = ours + name[len(theirs) :] if name.startswith(theirs) else name.replace(theirs, ours)
        renamed[name] = tensor
    placed = placements(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(placed[name].part(renamed.pop(name)))
    assert not renamed, sorted(renamed)


def make_trainer(world: Communicator, task: StepTask, tensor: int, *, overlap: bool) -> Trainer:
    """A trainer of the task. Collective over ``world``; the caller closes it."""
    config = config_of(task, world.size, tensor, overlap=overlap)
    grid, model = new_model(config, world, task_of(config).stage)
    load(model, task.weights)
    return Trainer(config, grid, model, task_of(config).objective(), TaskBatches(task, grid.data))


@contextmanager
def contestant_on(world: Communicator, task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of a `StepTask` with weights. way: the size of a tensor group. Collective over ``world``."""
    with closing(make_trainer(world, StepTask(**task), int(way), overlap=False)) as trainer:
        grid = trainer.grid
        yield lambda: trainer.step().loss, f"tensor {grid.tensor.size} x data {grid.data.size}, overlap off"
