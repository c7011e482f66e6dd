"""Models by name: those of the paper with their recipe (Shoeybi et al. 2019), and published mixtures of experts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from commengine import UsageError
from tplayers import T5Config, formulas
from tplayers.formulas import KeptTensors, TransformerShape

#: the word that prints the table instead of starting a run
LIST = "list"
#: sizes of a device's memory, in GB of 10^9 bytes, for which the table names the smallest tensor-parallel size
MEMORIES = (16, 32, 40, 80)
#: GB of a device that are left to CUDA's context, NCCL's buffers and workspaces
RESERVE_GB = 2.0

#: section 4.2: settings that all of the paper's runs have. The vocabulary is padded as in section 5.1.
_COMMON: dict[str, Any] = {
    "weight_decay": 0.01, "clip_grad": 1.0, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "recompute_granularity": "full", "make_vocab_size_divisible_by": 1024,
}  # fmt: skip
#: the recipe of each kind of model: sections 4.2 (both) and 5.3 (BERT)
RECIPES: dict[str, dict[str, Any]] = {
    "gpt": _COMMON | {
        "seq_length": 1024, "max_position_embeddings": 1024, "vocab_size": 50257, "global_batch_size": 512,
        "train_iters": 300_000, "lr": 1.5e-4, "min_lr": 1e-5, "lr_warmup_iters": 3000, "lr_decay_iters": 300_000,
        "lr_decay_style": "cosine",
    },
    "bert": _COMMON | {
        "seq_length": 512, "max_position_embeddings": 512, "vocab_size": 30522, "global_batch_size": 1024,
        "train_iters": 2_000_000, "lr": 1e-4, "min_lr": 0.0, "lr_warmup_iters": 10_000, "lr_decay_iters": 2_000_000,
        "lr_decay_style": "linear",
    },
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A model of the paper. task: of which training command it is, "gpt" or "bert".

    published: the paper's number of parameters. source: the paper's table. paper_tensor: the tensor-parallel size that
    the paper gives, or None.
    """

    name: str
    task: str
    layers: int
    hidden: int
    heads: int
    published: str
    source: str
    paper_tensor: int | None = None

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The settings that all models of this kind share."""
        return RECIPES[self.task]

    def shape(self, *, padded: bool = True) -> TransformerShape:
        """The model's shape, with the vocabulary padded or not."""
        vocab, multiple = self.recipe["vocab_size"], self.recipe["make_vocab_size_divisible_by"]
        if padded:
            vocab = -(-vocab // multiple) * multiple
        return TransformerShape(self.layers, self.hidden, self.heads, self.recipe["seq_length"], vocab, self.task)

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model, without padding of the vocabulary."""
        return round(formulas.parameters(self.shape(padded=False)))

    @property
    def tensor(self) -> int:
        """The tensor-parallel size: the paper's, or if it gives none, the smallest that fits 32 GB."""
        found = self.paper_tensor or self.smallest_tensor(32)
        assert found is not None
        return found

    def rank_bytes(self, tensor: int) -> float:
        """The bytes that a rank needs: bf16, micro-batch 1, full recomputation, several replicas, no ZeRO-1."""
        kept = KeptTensors(recompute="full", sends_together=True)
        return sum(formulas.training_bytes(self.shape(), 1, tensor, 2, kept).values())

    def smallest_tensor(self, gigabytes: float) -> int | None:
        """The smallest tensor-parallel size with which a rank fits a device, beside RESERVE_GB; None if none does."""
        shape = self.shape()
        dividing = (n for n in range(1, shape.heads + 1) if math.gcd(shape.heads, shape.hidden, shape.vocab) % n == 0)
        return next((n for n in dividing if self.rank_bytes(n) <= 1e9 * (gigabytes - RESERVE_GB)), None)

    def settings(self) -> dict[str, Any]:
        """The values of the training command's options."""
        return dict(self.recipe) | {
            "num_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": self.heads,
            "tensor_model_parallel_size": self.tensor,
        }  # fmt: skip


_TABLE = (
    Preset("gpt-355m", "gpt", 24, 1024, 16, "355M", "Table 2", 1),
    Preset("gpt-1.2b", "gpt", 40, 1536, 16, "1.2B", "Table 1", 1),
    Preset("gpt-2.5b", "gpt", 54, 1920, 20, "2.5B", "Tables 1, 2", 2),
    Preset("gpt-4.2b", "gpt", 64, 2304, 24, "4.2B", "Table 1", 4),
    Preset("gpt-8.3b", "gpt", 72, 3072, 24, "8.3B", "Table 2", 8),
    Preset("gpt-8.3b-32-heads", "gpt", 72, 3072, 32, "8.3B", "Table 1", 8),
    Preset("bert-336m", "bert", 24, 1024, 16, "336M", "Table 4"),
    Preset("bert-1.3b", "bert", 24, 2048, 32, "1.3B", "Table 4"),
    Preset("bert-3.9b", "bert", 48, 2560, 40, "3.9B", "Table 4"),
)
#: by name
PRESETS = {preset.name: preset for preset in _TABLE}

#: settings that all of the mixtures have: the Llama family without dropout
_DECODER: dict[str, Any] = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "rotary_base": 1e6,
    "group_query_attention": True, "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": 128,
}  # fmt: skip
_MIXTRAL = _DECODER | {"vocab_size": 32000, "num_query_groups": 8, "num_experts": 8, "moe_router_topk": 2}
_QWEN = _DECODER | {"vocab_size": 151936, "norm_epsilon": 1e-6}
#: published mixtures of experts by name: the shape alone, because their recipes are not published in full
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": _MIXTRAL | {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336,
        "max_position_embeddings": 32768,
    },
    "mixtral-8x22b": _MIXTRAL | {
        "num_layers": 56, "hidden_size": 6144, "num_attention_heads": 48, "ffn_hidden_size": 16384,
        "max_position_embeddings": 65536,
    },
    "qwen1.5-moe-a2.7b": _QWEN | {
        "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 16, "add_qkv_bias": True,
        "max_position_embeddings": 8192, "num_experts": 60, "moe_router_topk": 4, "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 5632, "moe_shared_expert_gate": True, "moe_router_pre_softmax": True,
    },
    "qwen3-30b-a3b": _QWEN | {
        "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128,
        "qk_layernorm": True, "max_position_embeddings": 40960, "num_experts": 128, "moe_router_topk": 8,
        "moe_ffn_hidden_size": 768,
    },
}  # fmt: skip

_T5 = {"vocab_size": 32128, "make_vocab_size_divisible_by": 128}
_OF_1_1: dict[str, Any] = {
    "gated_gelu": True, "untie_embeddings_and_output_weights": True, "disable_decoder_output_scale": True,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_T5_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")
_T5_TABLE = {
    "t5-small": (6, 512, 2048, 8, 64), "t5-base": (12, 768, 3072, 12, 64), "t5-large": (24, 1024, 4096, 16, 64),
    "t5-3b": (24, 1024, 16384, 32, 128), "t5-11b": (24, 1024, 65536, 128, 128),
    "t5-1.1-small": (8, 512, 1024, 6, 64), "t5-1.1-base": (12, 768, 2048, 12, 64),
    "t5-1.1-large": (24, 1024, 2816, 16, 64), "t5-1.1-xl": (24, 2048, 5120, 32, 64),
    "t5-1.1-xxl": (24, 4096, 10240, 64, 64),
}  # fmt: skip
#: T5 (Raffel et al. 2020) and its release 1.1 by name: the shape alone, and no dropout in the pretraining of 1.1
T5S: dict[str, dict[str, Any]] = {
    name: _T5 | (_OF_1_1 if "1.1" in name else {}) | dict(zip(_T5_SIZES, sizes, strict=True))
    for name, sizes in _T5_TABLE.items()
}
#: the layers of a teacher of 12 from which the published students start
_OF_TWELVE = {"num_layers": 6, "hidden_size": 768, "num_attention_heads": 12, "student_layers": "0,2,4,7,9,11"}
#: students of BERT-base and of GPT-2 (Sanh et al. 2019) by the training command: their shapes, with --teacher
STUDENTS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": {"distilbert": _OF_TWELVE | {
        "norm_placement": "post", "bert_no_binary_head": True, "bert_no_token_types": True, "norm_epsilon": 1e-12,
        "vocab_size": 30522, "max_position_embeddings": 512, "distill_temperature": 2.0,
    }},
    "gpt": {"distilgpt2": _OF_TWELVE | {
        "vocab_size": 50257, "max_position_embeddings": 1024, "distill_temperature": 2.0,
    }},
}  # fmt: skip
#: the presets that set the shape alone, by the training command
SHAPES = {"gpt": MIXTURES | STUDENTS["gpt"], "bert": STUDENTS["bert"], "t5": T5S}


@dataclass(frozen=True)
class FinetuningRecipe:
    """A row of Table 6, and what the paper does not say. task: mnli, qqp, squad-1.1, squad-2.0 or race.

    batch, rate: for the three models of Table 4, in order. weight_decay, warmup (a share of the steps): those of
    Megatron-LM's scripts for MNLI and RACE; for the others those of RoBERTa, whose procedure the paper follows (Liu et
    al. 2019).
    """

    task: str
    batch: tuple[int, int, int]
    rate: tuple[float, float, float]
    epochs: int
    seq_length: int
    weight_decay: float
    warmup: float


_MODELS = ("bert-336m", "bert-1.3b", "bert-3.9b")  # Table 6 calls the last one 3.8B
_TABLE_6 = (
    FinetuningRecipe("mnli", (128, 128, 128), (1e-5, 1e-5, 1e-5), 10, 512, 0.1, 0.065),
    FinetuningRecipe("qqp", (128, 128, 256), (5e-5, 3e-5, 4e-5), 12, 512, 0.1, 0.25),
    FinetuningRecipe("squad-1.1", (64, 48, 48), (3e-5, 3e-5, 1e-5), 2, 384, 0.01, 0.06),
    FinetuningRecipe("squad-2.0", (48, 64, 48), (3e-5, 3e-5, 1e-5), 2, 384, 0.01, 0.06),
    FinetuningRecipe("race", (32, 16, 32), (2e-5, 1e-5, 2e-5), 3, 512, 0.1, 0.06),
)
#: by task
FINETUNING = {recipe.task: recipe for recipe in _TABLE_6}


def finetuning_settings(name: str, task: str | None) -> dict[str, Any]:
    """The values of options that ``--preset name`` sets in ``finetune``: the model's shape and the task's recipe.

    task: as in `FinetuningRecipe`; any other sets the shape alone, and the run's own check of ``--task`` speaks.
    ``list`` prints the table and raises SystemExit. Raises UsageError for a name that is no BERT.
    """
    preset = _find_or_list(name, "bert", finetuning_table)
    shape = ("num_layers", "hidden_size", "num_attention_heads", "tensor_model_parallel_size")
    found = {one: value for one, value in preset.settings().items() if one in (*shape, *_OF_FINETUNING)}
    if (recipe := FINETUNING.get(task or "")) is not None:
        model = _MODELS.index(name)
        found |= {
            "global_batch_size": recipe.batch[model], "lr": recipe.rate[model], "epochs": recipe.epochs,
            "seq_length": recipe.seq_length, "weight_decay": recipe.weight_decay, "lr_warmup_fraction": recipe.warmup,
        }  # fmt: skip
    return found


#: settings of the pretraining that hold for fine-tuning, too
_OF_FINETUNING = ("clip_grad", "hidden_dropout", "attention_dropout", "recompute_granularity")


def finetuning_table() -> Iterator[str]:
    """Yield markdown: Table 6 with a row for each task and model."""
    yield "| task | preset | batch | rate | epochs | sequence | weight decay | warm-up |"
    yield f"|---|---|{'---:|' * 6}"
    for recipe in _TABLE_6:
        for name, batch, rate in zip(_MODELS, recipe.batch, recipe.rate, strict=True):
            cells = [recipe.task, name, batch, f"{rate:g}", recipe.epochs, recipe.seq_length, recipe.weight_decay]
            yield f"| {' | '.join(map(str, cells))} | {recipe.warmup:g} of the steps |"
    yield ""
    yield (
        "batch, rate, epochs: Table 6 of the paper; its 3.8B is bert-3.9b. weight decay, warm-up: not in the paper; of "
        "Megatron-LM's scripts (mnli, race) and of RoBERTa, whose procedure the paper follows."
    )


def find(name: str, task: str | None = None) -> Preset:
    """The preset of this name. Raises UsageError if there is none, or none of ``task`` where that is given."""
    of_task = [one.name for one in _TABLE if task in (None, one.task)]
    if name in of_task:
        return PRESETS[name]
    owner = PRESETS[name].task if name in PRESETS else next((of for of, one in SHAPES.items() if name in one), None)
    other = f"is a model of pretrain_{owner}; " if owner else ""
    valid = ", ".join([*of_task, *SHAPES.get(task or "", ())])
    raise UsageError(f"--preset {name}: {other}valid here: {valid}, or {LIST}, which prints the table")


def settings(name: str, task: str) -> dict[str, Any]:
    """The values of options that ``--preset name`` sets in the training command of ``task``.

    ``list`` prints the table and raises SystemExit. Raises UsageError for a name that the command does not have.
    """
    if name in (shapes := SHAPES.get(task, {})):
        return dict(shapes[name])
    return _find_or_list(name, task, table).settings()


def _find_or_list(name: str, task: str, lines: Callable[[], Iterator[str]]) -> Preset:
    if name == LIST:
        print("\n".join(lines()), flush=True)
        sys.exit(0)
    return find(name, task)


def table() -> Iterator[str]:
    """Yield markdown: a row for each preset."""
    columns = ["preset", "of", "layers", "hidden", "heads", "sequence", "parameters", "paper", "TP", "batch", "rate"]
    columns += ["GB a rank", *(f"TP for {size} GB" for size in MEMORIES)]
    yield f"| {' | '.join(columns)} |"
    yield f"|---|---|{'---:|' * 5}---|{'---:|' * (len(columns) - 8)}"
    for one in _TABLE:
        cells: list[Any] = [one.name, one.source, one.layers, one.hidden, one.heads, one.recipe["seq_length"]]
        cells += [f"{one.parameters:,}", one.published, one.tensor, one.recipe["global_batch_size"], one.recipe["lr"]]
        cells.append(f"{one.rank_bytes(one.tensor) / 1e9:.1f}")
        cells += [one.smallest_tensor(size) or "none" for size in MEMORIES]
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    yield (
        "parameters: without padding of the vocabulary. GB a rank: in GB of 10^9 bytes, at the preset's TP, with bf16, "
        "micro-batch 1, full recomputation, several replicas that overlap the reduction of gradients, and no ZeRO-1. "
        f"TP for M GB: the smallest tensor-model-parallel size with which a rank leaves {RESERVE_GB:g} GB of M free."
    )
    yield (
        "GPT: 300,000 steps, warm-up 3,000, cosine decay to 1e-5. BERT: 2,000,000 steps, warm-up 10,000, linear decay. "
        "All: dropout 0.1, weight decay 0.01, gradient norm clipped at 1, --recompute-granularity full."
    )
    yield ""
    yield "| mixture of experts | layers | hidden | heads | experts | of a token | width of an expert |"
    yield f"|---|{'---:|' * 6}"
    for name, shape in MIXTURES.items():
        width = shape.get("moe_ffn_hidden_size") or shape["ffn_hidden_size"]
        keys = ("num_layers", "hidden_size", "num_attention_heads", "num_experts", "moe_router_topk")
        yield f"| {' | '.join(map(str, [name, *(shape[key] for key in keys), width]))} |"
    yield ""
    yield "| T5 | layers of a stack | hidden | feed-forward | heads | size of a head | parameters |"
    yield f"|---|{'---:|' * 6}"
    for name, shape in T5S.items():
        yield f"| {' | '.join(map(str, [name, *(shape[key] for key in _T5_SIZES)]))} | {t5_parameters(name):,} |"
    yield ""
    yield "These set the shape alone, as published; batch, rate and steps are the command's defaults."


def t5_parameters(name: str) -> int:
    """The parameters of one of `T5S`, as Hugging Face's model has them."""
    one = T5S[name]
    sizes = {size: one[size] for size in (*_T5_SIZES, "vocab_size")}
    gated = "gated_gelu" in one
    config = T5Config(**sizes, swiglu=gated, untie_embeddings_and_output_weights=gated)
    return formulas.parameters(config.cost_shape(1))
