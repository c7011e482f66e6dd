"""The mapping has every parameter of transformers' models once, both ways. Tests of the models use its values."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.weights.hugging_face import from_hugging_face, to_hugging_face
from tplayers import BERT, GPT, BERTConfig, GPTConfig, placements
from trainers.weights.hugging_face import hugging_face_tensors

H, VOCAB = 8, 21
COMMON = {"hidden_size": H, "num_attention_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 6}
LLAMA = {"make_vocab_size_divisible_by": 8, "normalization": "RMSNorm", "swiglu": True, "ffn_hidden_size": 12,
         "position_embedding_type": "rope", "add_bias_linear": False}  # fmt: skip
MODELS = {
    "gpt": (GPT, GPTConfig(2, **COMMON, make_vocab_size_divisible_by=8)),
    "pre-LN BERT": (BERT, BERTConfig(2, **COMMON, make_vocab_size_divisible_by=8)),
    "post-LN BERT": (BERT, BERTConfig(2, **COMMON, make_vocab_size_divisible_by=8, norm_placement="post")),
    "BERT without binary head": (BERT, BERTConfig(2, **COMMON, make_vocab_size_divisible_by=8, binary_head=False)),
    "Llama": (GPT, GPTConfig(2, **COMMON, **LLAMA, untie_embeddings_and_output_weights=True)),
    "Qwen 2, tied, grouped": (GPT, GPTConfig(2, **COMMON, **LLAMA, num_query_groups=1, add_qkv_bias=True)),
}


#: all that building a module needs of a communicator
ALONE = SimpleNamespace(rank=0, size=1)


def theirs(name):
    """The model of transformers, of the same sizes."""
    transformers = pytest.importorskip("transformers", reason="the names are those of transformers' models")
    if name == "gpt":
        shape = transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=6, n_embd=H, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(shape)
    if name in ("Llama", "Qwen 2, tied, grouped"):
        sizes = {**COMMON, "num_hidden_layers": 2, "intermediate_size": 12}
        if name == "Llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        grouped = {"num_key_value_heads": 1, "tie_word_embeddings": True}
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **grouped))
    sizes = {**COMMON, "num_hidden_layers": 2, "intermediate_size": 4 * H}
    if name == "pre-LN BERT":
        return transformers.MegatronBertForPreTraining(transformers.MegatronBertConfig(**sizes))
    if name == "post-LN BERT":
        return transformers.BertForPreTraining(transformers.BertConfig(**sizes))
    return transformers.MegatronBertForMaskedLM(transformers.MegatronBertConfig(**sizes))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_both_ways(name):
    model, shape = MODELS[name]
    ours = {n: placement.shape for n, placement in placements(model(shape, ALONE)).items()}
    parameters = dict(theirs(name).named_parameters())
    found = from_hugging_face(parameters, shape)
    assert {n: tuple(tensor.shape) for n, tensor in found.items()} == ours
    whole = from_hugging_face(theirs(name).state_dict(keep_vars=True), shape)  # with tied names and buffers
    assert whole.keys() == found.keys()
    back = to_hugging_face(found, shape)
    assert back.keys() == parameters.keys()
    for n, parameter in parameters.items():
        assert torch.equal(back[n], parameter) and back[n].is_contiguous(), n
    for tensor in hugging_face_tensors(shape):
        if tensor.vocabulary:
            assert (found[tensor.ours][VOCAB:] == 0).all()


@pytest.mark.parametrize("name", ["gpt", "pre-LN BERT", "post-LN BERT"])
def test_their_model_takes_what_we_write(name):
    """All that it asks for is there, but the tied parameters and the buffers."""
    model, shape = MODELS[name]
    ours = {n: torch.ones(p.shape) for n, p in placements(model(shape, ALONE)).items()}
    peer: nn.Module = theirs(name)
    missing, unexpected = peer.load_state_dict(to_hugging_face(ours, shape), strict=False)
    tied = {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(missing) <= tied and not unexpected
    assert all((parameter == 1).all() for parameter in peer.parameters())
