"""Megatron-LM's files of all versions, at all sizes, are one model; other files end in one error that names them."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.megatron_files import AttentionMask, contents, write_megatron
from tplayers import BERT, GPT, BERTConfig, GPTConfig, initialize, placements
from trainers.files.reading import InputFileError
from trainers.weights.megatron import open_megatron

H, HEADS, VOCAB, POSITIONS, PADDED = 12, 6, 13, 5, 16
SIZES = (2, H, HEADS, VOCAB, POSITIONS)
CONFIGS = {
    "gpt": GPTConfig(*SIZES, ffn_hidden_size=20, make_vocab_size_divisible_by=10),
    "bert": BERTConfig(*SIZES, ffn_hidden_size=20, make_vocab_size_divisible_by=10, gelu="tanh", head_gelu="erf"),
    "no order": BERTConfig(*SIZES, ffn_hidden_size=20, make_vocab_size_divisible_by=10, binary_head=False),
}


def alone(rank=0, size=1):
    """All that building a module needs of a communicator."""
    return SimpleNamespace(rank=rank, size=size)


def model(kind, comm=None):
    return (GPT if kind == "gpt" else BERT)(CONFIGS[kind], comm or alone())


@pytest.fixture(scope="module")
def whole():
    """The global tensors of each model, without vocabulary padding; no two numbers are equal."""
    found = {}
    for kind in CONFIGS:
        one = model(kind)
        initialize(one, 3)
        for number, parameter in enumerate(one.parameters()):
            parameter.data += torch.arange(parameter.numel()).view(parameter.shape) + 1000 * number
        found[kind] = {
            name: parameter.detach()[:VOCAB] if name in ("embedding.weight", "mlm_head.bias") else parameter.detach()
            for name, parameter in one.named_parameters()
        }
    del found["no order"]["token_type_embedding"]
    return found


@pytest.fixture(autouse=True)
def their_package(monkeypatch):
    """The package whose enumeration the files hold; it is there when they are written only."""
    module = ModuleType("megatron.model.enums")
    module.AttnMaskType = AttentionMask
    for name in ("megatron", "megatron.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.model.enums", module)


def forget_their_package():
    for name in ("megatron.model.enums", "megatron.model", "megatron"):
        sys.modules.pop(name)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_all_versions_at_all_sizes_are_one_model(tmp_path, whole, kind, version, ranks):
    files = contents(whole[kind], HEADS, version=version, ranks=ranks, padded=PADDED, vocab_size=VOCAB)
    write_megatron(tmp_path, files, old=version == 0)
    forget_their_package()
    found = open_megatron(tmp_path)
    assert (found.kind, found.version, found.iteration) == ("gpt" if kind == "gpt" else "bert", version, 7)
    assert set(found.names) == set(whole[kind])
    for name, tensor in whole[kind].items():
        assert torch.equal(found.tensor(name), tensor), name
    for rank in range(2):  # the parts of two ranks, with the padding of our vocabulary
        ours = model(kind, alone(rank, 2))
        placed = placements(ours)
        parts = found.parts(CONFIGS[kind], placed)
        for name, parameter in ours.named_parameters():
            expected = whole[kind].get(name, torch.zeros(placed[name].shape))
            missing = placed[name].shape[0] - len(expected)
            expected = torch.cat([expected, torch.zeros(missing, *expected.shape[1:])])
            parts[name](parameter.data)
            assert torch.equal(parameter, placed[name].part(expected)), name
    found.close()


def test_the_settings_are_those_of_the_function(tmp_path, whole):
    write_megatron(tmp_path, contents(whole["bert"], HEADS, version=3, padded=PADDED, vocab_size=VOCAB))
    forget_their_package()
    assert open_megatron(tmp_path).settings == {
        "num_layers": 2, "hidden_size": H, "ffn_hidden_size": 20, "num_attention_heads": HEADS,
        "max_position_embeddings": POSITIONS, "vocab_size": VOCAB, "norm_epsilon": 1e-5, "hidden_dropout": 0.2,
        "attention_dropout": 0.3, "gelu": "tanh", "head_gelu": "erf", "bert_no_binary_head": False,
    }  # fmt: skip


def test_a_file_alone_a_folder_alone_and_a_release(tmp_path, whole):
    (file,) = write_megatron(tmp_path, contents(whole["gpt"], HEADS, version=2, vocab_size=VOCAB,
                                                make_vocab_size_divisible_by=1), alone=True)  # fmt: skip
    forget_their_package()
    for path in (file, file.parent, tmp_path):
        assert torch.equal(open_megatron(path).tensor("embedding.weight"), whole["gpt"]["embedding.weight"])
    file.parent.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert open_megatron(tmp_path).iteration == 7


def test_a_release_without_settings_needs_heads_and_vocabulary(tmp_path, whole):
    (one,) = contents(whole["gpt"], HEADS, version=0, padded=PADDED)
    del one["args"]
    write_megatron(tmp_path, [one])
    with pytest.raises(InputFileError, match=r"has no settings.*attention heads must be given"):
        open_megatron(tmp_path, vocab_size=VOCAB)
    with pytest.raises(InputFileError, match="has 16 tokens with the padding; the size of the vocabulary without it"):
        open_megatron(tmp_path, num_attention_heads=HEADS)
    with pytest.raises(InputFileError, match="a vocabulary of 17 was asked for; it has 16"):
        open_megatron(tmp_path, num_attention_heads=HEADS, vocab_size=17)
    found = open_megatron(tmp_path, num_attention_heads=HEADS, vocab_size=VOCAB)
    assert torch.equal(found.tensor("layers.1.attention.qkv.weight"), whole["gpt"]["layers.1.attention.qkv.weight"])


def test_a_well_known_tokenizer_tells_the_vocabulary(tmp_path):
    config = GPTConfig(1, 8, 2, 50257, 4, make_vocab_size_divisible_by=1)
    one = GPT(config, alone())
    initialize(one, 0)
    tensors = {name: parameter.detach() for name, parameter in one.named_parameters()}
    known = {"tokenizer_type": "GPT2BPETokenizer", "make_vocab_size_divisible_by": 128}
    write_megatron(tmp_path, contents(tensors, 2, version=3, padded=50304, **known))
    assert open_megatron(tmp_path).settings["vocab_size"] == 50257
    write_megatron(tmp_path / "other", contents(tensors, 2, version=3, padded=50432, **known))
    with pytest.raises(InputFileError, match="has 50432 tokens with the padding"):
        open_megatron(tmp_path / "other")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swiglu": True}, "swiglu=True changes the model's function; supported: False"),
        ({"normalization": "RMSNorm"}, "normalization='RMSNorm' changes"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=True changes"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2 changes"),
        ({"num_experts": 4}, "num_experts=4 changes"),
        ({"bias_gelu_fusion": False}, "bias_gelu_fusion=False is GELU by the error function"),
        ({"num_attention_heads": 5}, "5 attention heads do not divide hidden_size=12"),
        ({"hidden_size": 24}, "hidden_size is 24 in the settings .args., and 12 by the tensors"),
        ({"kv_channels": 4}, "kv_channels=4; supported: 2"),
        ({"layernorm_epsilon": "x"}, "norm_epsilon='x'; needed: a number"),
        (
            {"tensor_model_parallel_size": 2},
            "tensor-model-parallel size 2 has a file mp_rank_. for each rank; found: 1",
        ),
    ],
)
def test_a_model_that_ours_cannot_be_is_refused_by_name(tmp_path, whole, changes, said):
    write_megatron(tmp_path, contents(whole["gpt"], HEADS, version=3, padded=PADDED, vocab_size=VOCAB, **changes))
    with pytest.raises(InputFileError, match=said):
        open_megatron(tmp_path)


def test_what_is_missing_or_does_not_fit_is_named(tmp_path, whole):
    files = write_megatron(tmp_path, contents(whole["gpt"], HEADS, version=3, ranks=2, padded=PADDED, vocab_size=VOCAB))
    good = torch.load(files[1], weights_only=False)

    def refused(said, change):
        changed = torch.load(files[1], weights_only=False)
        change(changed)
        torch.save(changed, files[1])
        with pytest.raises(InputFileError, match=said) as error:
            open_megatron(tmp_path)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
        torch.save(good, files[1])

    layers = lambda one: one["model"]["language_model"]["encoder"]  # noqa: E731
    refused(r"lacks language_model\.transformer\.final_layernorm\.bias, \[12\]",
            lambda one: layers(one).pop("final_layernorm.bias"))  # fmt: skip
    refused(r"mlp\.dense_h_to_4h\.weight is \[10, 11\] of torch\.float32; needed: \[10, 12\] of floats",
            lambda one: layers(one).update({"layers.1.mlp.dense_h_to_4h.weight": torch.zeros(10, 11)}))  # fmt: skip
    refused(r"the model has no place for language_model\.transformer\.layers\.1\.extra",
            lambda one: layers(one).update({"layers.1.extra": torch.zeros(1)}))  # fmt: skip
    refused("is of checkpoint version 2; that of rank 0 is of 3", lambda one: one.update(checkpoint_version=2.0))
    refused(r"checkpoint_version=4\.0; valid: 0, 1, 2, 3", lambda one: one.update(checkpoint_version=4.0))
    refused("no checkpoint of Megatron-LM: it has the keys", lambda one: one.pop("model"))
    assert open_megatron(tmp_path).shape.layers == 2  # the files are whole again
    smaller = GPTConfig(1, *SIZES[1:], ffn_hidden_size=20)
    with pytest.raises(ValueError, match=r"not the model's tensors: layers\.1\.attention\.projection\.bias"):
        open_megatron(tmp_path).parts(smaller, placements(GPT(smaller, alone())))
    other = GPTConfig(2, *SIZES[1:], ffn_hidden_size=24)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up\.weight is \[20, 12\], the model's is \[24, 12\]"):
        open_megatron(tmp_path).parts(other, placements(GPT(other, alone())))


def test_folders_without_a_checkpoint_are_named(tmp_path, whole):
    files = write_megatron(tmp_path, contents(whole["gpt"], HEADS, version=3, ranks=2, padded=PADDED, vocab_size=VOCAB))
    newest = files[0].parent.parent
    files[0].rename(tmp_path / "aside")
    with pytest.raises(InputFileError, match=r"mp_rank_00: lacks model_optim_rng\.pt or model_rng\.pt"):
        open_megatron(tmp_path)
    files[0].parent.rmdir()
    with pytest.raises(InputFileError, match="lacks mp_rank_00; it has mp_rank_01"):
        open_megatron(tmp_path)
    files[1].parent.rename(newest / "mp_rank_00_000")
    with pytest.raises(InputFileError, match="mp_rank_00_000: a part of a pipeline-parallel run"):
        open_megatron(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../../x")
    with pytest.raises(InputFileError, match=r"latest_checkpointed_iteration.txt: '../../x'; needed: a number"):
        open_megatron(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(InputFileError, match=r"iter_0000008: there is no such folder; latest_checkpointed_iteration"):
        open_megatron(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputFileError, match=r"no checkpoint of Megatron-LM; needed: model_optim_rng\.pt, mp_rank_00 or"):
        open_megatron(tmp_path / "empty")
