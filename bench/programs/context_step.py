"""The step of a Llama's training on ranks that share sequences, as a contestant of ``bench.contest context``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from bench.timing.slow_link import slow_down
from commengine import Communicator
from trainers.tasks.gpt import GPTTrainConfig
from trainers.tasks.training import transformer_trainer


@dataclass(frozen=True)
class ContextTask:
    """One step on one sequence. fp32, no dropout. rate: bytes per second of the context group's link; 0: as it is."""

    hidden_size: int = 256
    num_layers: int = 2
    num_attention_heads: int = 4
    num_query_groups: int = 4
    vocab_size: int = 512
    seq_length: int = 1024
    rate: float = 0.0

    def config(self, ranks: int, way: str) -> GPTTrainConfig:
        """The settings with which pretrain_gpt makes such steps. way: of ``--cp-comm-type``."""
        config = GPTTrainConfig(
            num_layers=self.num_layers, hidden_size=self.hidden_size, num_attention_heads=self.num_attention_heads,
            group_query_attention=True, num_query_groups=self.num_query_groups, seq_length=self.seq_length,
            vocab_size=self.vocab_size, make_vocab_size_divisible_by=1, mock_data=True, hidden_dropout=0.0,
            attention_dropout=0.0, normalization="RMSNorm", swiglu=True, position_embedding_type="rope",
            disable_bias_linear=True, lr=1e-4, min_lr=0.0, lr_decay_style="constant", device="cpu",
            context_parallel_size=ranks, cp_comm_type=way if ranks > 1 else None,
            overlap_p2p_communication=(self.rate > 0 and ranks > 1 and way != "a2a") or None,
        )  # fmt: skip
        config.validate(ranks)
        return config.completed(ranks)


@contextmanager
def contestant_on(world: Communicator, task: dict[str, Any], way: str) -> Iterator[tuple[Callable[[], float], str]]:
    """The step of a `ContextTask`, over all ranks as one context group. way: of ``--cp-comm-type``."""
    given = ContextTask(**task)
    config = given.config(world.size, way)
    with closing(transformer_trainer(config, world, config.open_corpus())) as trainer:
        if given.rate:
            slow_down(trainer.grid.context, given.rate)
        threads = "messages on threads" if config.overlap_p2p_communication else "messages without threads"
        yield lambda: trainer.step().loss, f"{config.context_method}, {threads}" if world.size > 1 else "one rank"
