"""Teacher: a trained model whose logits and hidden states the ranks of another model get, each its own columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commengine import Communicator, ProcessGrid, UsageError
from commengine.options.declared import flag_of, given, require
from commengine.rank_zero import on_every_rank
from tplayers import TransformerConfig, kept_output
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.trained import load_trained
from trainers.training.precision import parameter_dtype


class Teacher:
    """The model of ``config.teacher`` on the ranks of the last pipeline stage, which alone have logits of the student.

    Its tensor groups may have another size than those of the student. If they are smaller, each has the whole batch of
    the student's group, and a rank is in the one whose shard has its columns. If they are larger, several replicas of
    the student share one, which computes the batches of all of them at once.

    Collective over the world of ``grid``; `outputs` is over the ranks of the last stage. student: the shape of the
    student. Raises UsageError, on all ranks, where the teacher does not fit it or the ranks.
    """

    def __init__(self, config: GPTSettings | BERTSettings, grid: ProcessGrid, student: TransformerConfig) -> None:
        assert config.teacher is not None
        own, self.size = grid.tensor.size, config.teacher_tensor_model_parallel_size or grid.tensor.size
        index, replica = grid.tensor.rank, grid.data.rank
        #: replicas of the student that share a tensor group of the teacher, and groups that share one of the student
        self.shared, self.split = max(self.size // own, 1), max(own // self.size, 1)
        if self.size < own:
            key = replica * own + index % self.split * self.size + index // self.split
        else:
            key = replica // self.shared * self.size + index * self.shared + replica % self.shared
        last = grid.pipeline.rank == grid.pipeline.size - 1
        ranks = grid.world.split(0 if last else None, key, name="teacher")
        self.model: Any = None
        self._made: list[Communicator | ProcessGrid] = []
        self.mates: Communicator | None = None
        self._column, self._hidden = index % self.split, config.distill_cosine > 0
        problem: UsageError | None = None
        if ranks is not None:
            dtype = parameter_dtype(bf16=config.bf16, fp16=config.fp16)
            self._made.append(ranks)
            try:
                self._made.append(made := ProcessGrid(ranks, tensor=self.size))
                trained = load_trained(config.teacher, made, kind=config.kind, dtype=dtype)
                self.model = trained.model
                _require_same_inputs(config, student, self.model.config)
            except UsageError as error:
                said = str(error).replace("--load", "--teacher")
                problem = UsageError(said.replace("--tensor-model-parallel", "--teacher-tensor-model-parallel"))
            if self.shared > 1:
                self.mates = grid.data.split(replica // self.shared, replica, name="students of a teacher")
                assert self.mates is not None
                self._made.append(self.mates)

        def told() -> None:
            if problem is not None:
                raise problem

        on_every_rank(grid.world, told)

    def close(self) -> None:
        """Close the groups. Collective, as construction."""
        for one in reversed(self._made):
            one.close()

    def outputs(self, call: Callable[..., Tensor], inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
        """The teacher's logits and its last hidden states for a micro-batch; None for these where no loss has them.

        call: gives the logits [B, n, columns of the teacher's shard] of the model for inputs [B, ...]. The results are
        [b, n, padded vocabulary / ranks of a tensor group of the student] and [s, b, h].
        """
        inputs = [one if one is None else self._of_all(one) for one in inputs]
        with torch.no_grad(), kept_output(self.model.last_module) as kept:
            found = call(self.model, *inputs)
        hidden = kept[0] if self._hidden else None
        if self.mates is None:
            width = found.shape[-1] // self.split
            return found.narrow(-1, self._column * width, width), hidden
        of_each = found.reshape(self.shared, -1, *found.shape[1:]).contiguous()
        mine = torch.empty_like(of_each)
        self.mates.all_to_all(mine, of_each)
        if hidden is not None:
            hidden = hidden.chunk(self.shared, dim=1)[self.mates.rank]
        return mine.permute(1, 2, 0, 3).flatten(2), hidden

    def _of_all(self, x: Tensor) -> Tensor:
        """The rows of all replicas that share a tensor group of the teacher."""
        if self.mates is None:
            return x
        every = x.new_empty(self.shared * x.shape[0], *x.shape[1:])
        self.mates.all_gather(every, x.contiguous())
        return every


def _require_same_inputs(config: Any, student: TransformerConfig, teacher: TransformerConfig) -> None:
    """Raise UsageError unless both models take the same samples, and have the same columns of logits."""
    named = f"--teacher {config.teacher}"
    require(
        config.seq_length <= teacher.max_position_embeddings,
        f"{given(config, 'seq_length')}: {named} knows {teacher.max_position_embeddings} positions; valid: at most as "
        "many",
    )
    require(
        student.num_tokentypes == teacher.num_tokentypes or not student.num_tokentypes,
        f"{named}: has no token types, and the run has them; valid: --bert-no-token-types",
    )
    require(
        student.vocab_size == teacher.vocab_size,
        f"{named}: has {teacher.vocab_size} tokens, and the run {student.vocab_size}; valid: a teacher with the same "
        "vocabulary",
    )
    require(
        student.padded_vocab_size == teacher.padded_vocab_size,
        f"{given(config, 'make_vocab_size_divisible_by')}: pads the vocabulary to {student.padded_vocab_size}, and "
        f"{named} has {teacher.padded_vocab_size}; valid: {teacher.make_vocab_size_divisible_by}",
    )
    require(
        not config.distill_cosine or student.hidden_size == teacher.hidden_size,
        f"{given(config, 'distill_cosine')}: {named} is {teacher.hidden_size} wide, and the run "
        f"{student.hidden_size}; valid: 0, or equal --hidden-size",
    )


def start_from(teacher: Any, student: Any, layers: Sequence[int], fill: Callable[[str, Tensor], None]) -> None:
    """Fill the student's parameters with those of the teacher. Not collective.

    layers: the teacher's for each layer of the student. fill: called with each name and its values. Raises UsageError
    where a layer is not there, or a parameter is missing or has another shape.
    """
    flag, there = flag_of("student_layers"), teacher.config.num_layers
    said = f"{flag} {','.join(map(str, layers))}"
    require(
        len(layers) == student.config.num_layers and all(0 <= one < there for one in layers),
        f"{said}: want {student.config.num_layers} numbers, one for each layer, from 0 to {there - 1}",
    )
    values = dict(teacher.named_parameters())
    for name, parameter in student.named_parameters():
        group, _, rest = name.partition(".")
        number, _, of_layer = rest.partition(".")
        theirs = f"layers.{layers[int(number)]}.{of_layer}" if group == "layers" else name
        one = values.get(theirs)
        if one is None or one.shape != parameter.shape:
            found = "has none" if one is None else f"is {list(one.shape)} in the teacher"
            raise UsageError(f"{said}: {name} is {list(parameter.shape)} in the run, and {found}; valid: equal sizes")
        fill(name, one.detach().float())
