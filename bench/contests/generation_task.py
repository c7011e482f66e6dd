"""The text that every contestant of bench.generation writes: sizes of the model, its weights, the prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from commengine import Communicator
from tplayers import GPT, GPTConfig, placements
from trainers.weights.hugging_face import from_hugging_face


@dataclass(frozen=True)
class GenerationTask:
    """Greedy text after random prompts, by a GPT-2 of random weights, in fp32. The defaults are GPT-2's smallest model.

    A step continues ``batch`` prompts of ``prompt_tokens`` tokens by ``new_tokens`` tokens each.
    """

    num_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    vocab_size: int = 50257
    max_position_embeddings: int = 1024
    batch: int = 1
    prompt_tokens: int = 16
    new_tokens: int = 64
    seed: int = 0

    @property
    def config(self) -> GPTConfig:
        """The model's shape; the vocabulary is padded to a multiple of 128."""
        return GPTConfig(
            self.num_layers, self.hidden_size, self.num_attention_heads, self.vocab_size, self.max_position_embeddings,
            make_vocab_size_divisible_by=128,
        )  # fmt: skip

    def prompts(self) -> list[list[int]]:
        """The tokens of each prompt."""
        shape = (self.batch, self.prompt_tokens)
        found: list[list[int]] = np.random.default_rng(self.seed).integers(0, self.vocab_size, shape).tolist()
        return found

    def weights(self) -> dict[str, Tensor]:
        """The weights of `transformers`' ``GPT2LMHeadModel``, drawn as it draws its own: normal, of deviation 0.02."""
        h, generator = self.hidden_size, torch.Generator().manual_seed(self.seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).mul_(0.02)

        found = {"wte.weight": drawn(self.vocab_size, h), "wpe.weight": drawn(self.max_position_embeddings, h)}
        norms = ["ln_f"]
        for number in range(self.num_layers):
            layer = f"h.{number}"
            norms += [f"{layer}.ln_1", f"{layer}.ln_2"]
            for name, ins, outs in (
                ("attn.c_attn", h, 3 * h), ("attn.c_proj", h, h), ("mlp.c_fc", h, 4 * h), ("mlp.c_proj", 4 * h, h)
            ):  # fmt: skip
                found |= {f"{layer}.{name}.weight": drawn(ins, outs), f"{layer}.{name}.bias": torch.zeros(outs)}
        for name in norms:
            found |= {f"{name}.weight": torch.ones(h), f"{name}.bias": torch.zeros(h)}
        return {f"transformer.{name}": tensor for name, tensor in found.items()}

    def model(self, comm: Communicator) -> GPT:
        """This rank's part of the model, in evaluation mode. Not collective."""
        model, wholes = GPT(self.config, comm).eval(), from_hugging_face(self.weights(), self.config)
        with torch.no_grad():
            for name, placement in placements(model).items():
                model.get_parameter(name).copy_(placement.part(wholes[name]))
        return model

    def save(self, path: Path | str) -> None:
        """Write the task to a file."""
        Path(path).write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(path: Path | str) -> GenerationTask:
        """The task in a file."""
        return GenerationTask(**json.loads(Path(path).read_text()))


def checksum(texts: list[list[int]]) -> float:
    """A number from 0 to 1 that differs where the tokens differ: the "loss" by which a contest compares texts."""
    remainder = 0
    for token in (token for text in texts for token in text):
        remainder = (remainder * 65_599 + token + 1) % (2**31 - 1)
    return remainder / (2**31 - 1)
