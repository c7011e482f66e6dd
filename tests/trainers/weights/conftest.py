"""What the tests of other people's models share: random models of each family, in folders of transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB, POSITIONS = 57, 16
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
          "intermediate_size": 24, "max_position_embeddings": POSITIONS}  # fmt: skip
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8}  # fmt: skip
#: transformers' class, the class of its configuration, and the configuration
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": 32, "n_layer": 2, "n_head": 8, **_ENDS}),
    "BERT": ("BertForPreTraining", "BertConfig", _SIZES),
    "BERT without sentence order": ("BertForMaskedLM", "BertConfig", _SIZES | {"hidden_act": "gelu_new"}),
    "MegatronBert": ("MegatronBertForPreTraining", "MegatronBertConfig", _SIZES),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {
        **_SIZES, **_ENDS, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "Llama 3, two groups, tied": ("LlamaForCausalLM", "LlamaConfig", {
        **_SIZES, **_ENDS, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "SmolLM, one group": ("LlamaForCausalLM", "LlamaConfig", {
        **_SIZES, **_ENDS, "num_key_value_heads": 1, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "Mistral, large heads": ("MistralForCausalLM", "MistralConfig", {
        **_SIZES, **_ENDS, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None}),
    "GPT-2, five heads": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": 40, "n_layer": 2, "n_head": 5, **_ENDS}),
    "BERT, three heads": ("BertForPreTraining", "BertConfig", {
        **_SIZES, "num_attention_heads": 3, "hidden_size": 24}),
    "Llama, ten heads in two groups": ("LlamaForCausalLM", "LlamaConfig", {
        **_SIZES, **_ENDS, "hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 2}),
    "Qwen 2": ("Qwen2ForCausalLM", "Qwen2Config", {
        **_SIZES, **_ENDS, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {
        **_SIZES, **_ENDS, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen 2 MoE": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **_SIZES, **_ENDS, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SIZES, **_ENDS, "num_key_value_heads": 2, "head_dim": 8}),
    "Qwen 3 MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **_SIZES, **_ENDS, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 4,
        "moe_intermediate_size": 8}),
    "Qwen 2 MoE, weights of the chosen": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **_SIZES, **_ENDS, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 1,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "norm_topk_prob": True}),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """The name of a family, each in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def theirs() -> Callable[[str], Any]:
    """``theirs(name)``: a random model of a family; the same on every rank, and none of its parameters is constant."""
    transformers = pytest.importorskip("transformers", reason="it is the truth for models of Hugging Face")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def theirs(name: str) -> Any:
        kind, configuration, settings = FAMILIES[name]
        torch.manual_seed(7)
        model = getattr(transformers, kind)(getattr(transformers, configuration)(**settings)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model

    return theirs


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A new folder; under MPI rank 0's, on all ranks."""
    if "mpi_world" not in request.fixturenames:
        return tmp_path
    return Path(request.getfixturevalue("mpi_world").bcast(str(tmp_path)))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``command(world, *words)``: trainers.convert with these words, on the ranks of ``world``."""
    import sys

    from trainers import convert

    def command(world: Any, *words: Any) -> None:
        monkeypatch.setattr(sys, "argv", ["convert", *map(str, words)])
        convert.main(world)

    return command


def change(path: Path, **keys: Any) -> None:
    """Change the keys of a file of JSON; ... removes a key."""
    found = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))


@pytest.fixture(scope="session")
def changed() -> Callable[..., None]:
    """``changed(path, key=value)``: see `change`."""
    return change
