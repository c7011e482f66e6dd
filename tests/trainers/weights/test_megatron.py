"""Megatron-LM's files of all versions, at all sizes, are one model; other files end in one error that names them."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from commengine.files.reading import InputFileError
from tests.support.weights.megatron_files import AttentionMask, contents, write_megatron
from tplayers import BERT, GPT, BERTConfig, GPTConfig, initialize, placements
from trainers.weights.megatron import open_megatron

H, HEADS, VOCAB, POSITIONS, PADDED = 12, 6, 13, 5, 16
SIZES = (2, H, HEADS, VOCAB, POSITIONS)
CONFIGS = {
    "gpt": GPTConfig(*SIZES, ffn_hidden_size=20, make_vocab_size_divisible_by=10),
    "bert": BERTConfig(*SIZES, ffn_hidden_size=20, make_vocab_size_divisible_by=10, gelu="tanh", head_gelu="erf"),
    "no order": BERTConfig(*SIZES, ffn_hidden_size=20, make_vocab_size_divisible_by=10, binary_head=False),
}


#: all that building a module needs of a communicator
ALONE = SimpleNamespace(rank=0, size=1)


def model(kind):
    return (GPT if kind == "gpt" else BERT)(CONFIGS[kind], ALONE)


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
    assert type(found.config) is type(CONFIGS[kind]) and found.dtype == torch.float32
    shapes = {name: placement.shape for name, placement in placements(model(kind)).items()}
    assert found.parts(found.config, placements(model(kind))).keys() == shapes.keys()
    for name, shape in shapes.items():
        expected = whole[kind].get(name, torch.zeros(shape))
        padding = torch.zeros(shape[0] - len(expected), *shape[1:])  # of our vocabulary, not that of the file
        assert torch.equal(found.tensor(name, 20), torch.cat([expected, padding])), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_configuration_is_that_of_the_function(tmp_path, whole, kind):
    changes = {"bias_gelu_fusion": False} if kind == "no order" else {}
    write_megatron(tmp_path, contents(whole[kind], HEADS, version=3, padded=PADDED, vocab_size=VOCAB, **changes))
    forget_their_package()
    found = open_megatron(tmp_path)
    assert found.config.padded_vocab_size == 1024
    same = {"hidden_dropout": 0.2, "attention_dropout": 0.3, "make_vocab_size_divisible_by": 1024}
    forms = {} if kind == "gpt" else {"head_gelu": "erf"}
    assert found.config == replace(CONFIGS[kind], **same, **forms)


def test_the_dtype_is_the_widest(tmp_path, whole):
    half = {name: tensor if "norm" in name else tensor.half() for name, tensor in whole["gpt"].items()}
    write_megatron(tmp_path, contents(half, HEADS, version=3, padded=PADDED, vocab_size=VOCAB))
    found = open_megatron(tmp_path)
    assert found.dtype == torch.float32 and found.tensor("embedding.weight", VOCAB).dtype == torch.float16


def test_a_file_alone_a_folder_alone_and_a_release(tmp_path, whole):
    (file,) = write_megatron(tmp_path, contents(whole["gpt"], HEADS, version=2, vocab_size=VOCAB,
                                                make_vocab_size_divisible_by=1), alone=True)  # fmt: skip
    forget_their_package()
    for path in (file, file.parent, tmp_path):
        assert torch.equal(open_megatron(path).tensor("embedding.weight", VOCAB), whole["gpt"]["embedding.weight"])
    file.parent.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert open_megatron(tmp_path).config.num_layers == 2


def test_a_release_without_settings_needs_heads_and_vocabulary(tmp_path, whole):
    (one,) = contents(whole["gpt"], HEADS, version=0, padded=PADDED)
    del one["args"]
    write_megatron(tmp_path, [one])
    with pytest.raises(InputFileError, match=r"has no settings.*heads, --num-attention-heads"):
        open_megatron(tmp_path, vocab_size=VOCAB)
    with pytest.raises(InputFileError, match=r"has 16 tokens .*: give the number without it, --vocab-size"):
        open_megatron(tmp_path, num_attention_heads=HEADS)
    with pytest.raises(InputFileError, match="a vocabulary of 17 was asked for; it has 16"):
        open_megatron(tmp_path, num_attention_heads=HEADS, vocab_size=17)
    (said,) = contents(whole["gpt"], HEADS, version=0, padded=PADDED, vocab_size=VOCAB)
    write_megatron(tmp_path / "said", [said])
    with pytest.raises(InputFileError, match=r"a vocabulary of 10 was asked for; its settings \(args\) say 13"):
        open_megatron(tmp_path / "said", vocab_size=10)
    found = open_megatron(tmp_path, num_attention_heads=HEADS, vocab_size=VOCAB)
    assert torch.equal(
        found.tensor("layers.1.attention.qkv.weight", VOCAB), whole["gpt"]["layers.1.attention.qkv.weight"]
    )


def test_a_well_known_tokenizer_tells_the_vocabulary(tmp_path):
    config = GPTConfig(1, 8, 2, 50257, 4, make_vocab_size_divisible_by=1)
    one = GPT(config, ALONE)
    initialize(one, 0)
    tensors = {name: parameter.detach() for name, parameter in one.named_parameters()}
    known = {"tokenizer_type": "GPT2BPETokenizer", "make_vocab_size_divisible_by": 128}
    write_megatron(tmp_path, contents(tensors, 2, version=3, padded=50304, **known))
    assert open_megatron(tmp_path).config.vocab_size == 50257
    null = {"tokenizer_type": "NullTokenizer", "vocab_size": 50256, "make_vocab_size_divisible_by": 128}
    write_megatron(tmp_path / "null", contents(tensors, 2, version=3, padded=50304, **null))
    assert open_megatron(tmp_path / "null").config.vocab_size == 50257
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
        ({"layernorm_epsilon": 1e-5, "norm_epsilon": 1e-6}, "layernorm_epsilon=1e-05 contradicts norm_epsilon=1e-06"),
        ({"layernorm_epsilon": float("nan")}, "norm_epsilon='nan'; needed: a number from 0 to 1"),
        ({"hidden_dropout": -1}, "hidden_dropout='-1'; needed: a number from 0 to 1"),
        ({"window_size": (4, 0)}, r"window_size='\(4, 0\)' changes the model's function; supported: None"),
        ({"quick_gelu": True}, "quick_gelu=True changes"),
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


@pytest.mark.slow
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
    refused(r"mlp\.dense_h_to_4h\.weight is \[10, 11\] of torch\.float32; needed: \[10, 12\], dense, of 16",
            lambda one: layers(one).update({"layers.1.mlp.dense_h_to_4h.weight": torch.zeros(10, 11)}))  # fmt: skip
    refused(r"the model has no place for language_model\.transformer\.layers\.1\.extra",
            lambda one: layers(one).update({"layers.1.extra": torch.zeros(1)}))  # fmt: skip
    refused(r"not of the checkpoint of rank 0: checkpoint_version is 2 here and 3 in .*mp_rank_00",
            lambda one: one.update(checkpoint_version=2.0))  # fmt: skip
    refused("not of the checkpoint of rank 0: iteration is 8 here and 7 in", lambda one: one.update(iteration=8))
    refused("not of the checkpoint of rank 0: layernorm_epsilon is 0.1 here and 1e-05 in",
            lambda one: vars(one["args"]).update(layernorm_epsilon=0.1))  # fmt: skip
    refused("not of the checkpoint of rank 0: swiglu is True here and None in",
            lambda one: vars(one["args"]).update(swiglu=True))  # fmt: skip
    refused(r"rank=3 in its settings \(args\), in the place of the file of rank 1",
            lambda one: vars(one["args"]).update(rank=3))  # fmt: skip
    refused(r"has language_model\.transformer\.layers\.0\..* twice, under names of two releases",
            lambda one: one["model"]["language_model"].update(transformer=layers(one)))  # fmt: skip
    one = torch.load(files[1], weights_only=False)  # what rounding may do
    layers(one)["final_layernorm.weight"].mul_(1.0001)
    torch.save(one, files[1])
    assert open_megatron(tmp_path).config.num_layers == 2
    refused(r"checkpoint_version='4\.0'; valid: 0, 1, 2, 3", lambda one: one.update(checkpoint_version=4.0))
    refused(r"checkpoint_version='tensor.*'; valid", lambda one: one.update(checkpoint_version=torch.ones(3)))
    refused("damaged: the dicts of its model lie within each other without end",
            lambda one: one["model"].update(itself=one["model"]))  # fmt: skip
    empty = {"layers.1.mlp.dense_h_to_4h.bias": torch.zeros(10, device="meta")}
    refused(r"mlp\.dense_h_to_4h\.bias is \[10\] of torch\.float32; needed: \[10\], dense, of 16",
            lambda one: layers(one).update(empty))  # fmt: skip
    nested = {"layers.1.mlp.dense_h_to_4h.bias": torch.nested.nested_tensor([torch.zeros(4), torch.zeros(6)])}
    refused(r"mlp\.dense_h_to_4h\.bias is a nested tensor", lambda one: layers(one).update(nested))
    short = {"layers.1.mlp.dense_h_to_4h.bias": torch.zeros(10).to(torch.float8_e4m3fn)}
    refused(r"dense_h_to_4h\.bias is \[10\] of torch\.float8_e4m3fn; needed: \[10\], dense, of 16 to 64 bits",
            lambda one: layers(one).update(short))  # fmt: skip
    refused("no checkpoint of Megatron-LM: it has the keys", lambda one: one.pop("model"))
    assert open_megatron(tmp_path).config.num_layers == 2  # the files are whole again


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
    with pytest.raises(
        InputFileError, match=r"no checkpoint of Megatron-LM; needed: model_optim_rng\.pt, mp_rank_00 or"
    ):
        open_megatron(tmp_path / "empty")
