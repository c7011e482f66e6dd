"""config.json both ways, in the words of transformers 4 and 5, and what is refused by its name."""

import json

import pytest
import torch

from tplayers import BERTConfig, GPTConfig, RopeScaling
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.tasks.kinds import task_of
from trainers.weights.configurations import TaskHead, other_dropout, read_configuration, written_configuration
from trainers.weights.other_model import model_settings

#: as transformers 4 wrote it for Llama 3.1 8B, but for its size
LLAMA_V4 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": [2, 3, 4], "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
    "intermediate_size": 96, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 8, "num_hidden_layers": 3, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
#: as the first release of Mistral had it, but for its size and its window
MISTRAL_V4 = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 8, "num_hidden_layers": 3, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN2_V4 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 96, "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 8, "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
GPT2_V4 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 64, "n_head": 8, "n_layer": 3,
    "n_positions": 1024, "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True}},
}  # fmt: skip
BERT_V4 = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 64, "intermediate_size": 256,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 8,
    "num_hidden_layers": 3, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2,
    "vocab_size": 30522,
}  # fmt: skip
PUBLISHED = {"llama": LLAMA_V4, "mistral": MISTRAL_V4, "qwen2": QWEN2_V4, "gpt2": GPT2_V4, "bert": BERT_V4}


def read(folder, keys):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return read_configuration(folder)


def test_a_published_llama(tmp_path):
    found = read(tmp_path, LLAMA_V4)
    assert found == GPTConfig(
        3, 64, 8, vocab_size=128256, max_position_embeddings=131072, ffn_hidden_size=96, hidden_dropout=0.0,
        attention_dropout=0.0, norm_epsilon=1e-5, normalization="RMSNorm", swiglu=True, position_embedding_type="rope",
        rotary_base=500000.0, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), num_query_groups=2,
        add_bias_linear=False, untie_embeddings_and_output_weights=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_and_written_keys_give_the_same_model(tmp_path, name):
    """Read; as settings of a training command; written, with the origin and without it, and read again."""
    keys = PUBLISHED[name]
    found = read(tmp_path, keys)
    kind = BERTSettings if isinstance(found, BERTConfig) else GPTSettings
    settings = {name: value for name, value in model_settings(found).items() if name in kind.__dataclass_fields__}
    assert task_of(kind(**settings, make_vocab_size_divisible_by=1024)).model() == type(found)(
        **{**vars(found), "ffn_hidden_size": found.ffn_size}
    )
    for origin in (keys, None):
        written = written_configuration(found, torch.bfloat16, origin)
        again = read(tmp_path / "again", written)
        assert {**vars(again), "ffn_hidden_size": 0} == {**vars(found), "ffn_hidden_size": 0}
        assert again.ffn_size == found.ffn_size
        assert written["dtype"] == written["torch_dtype"] == "bfloat16"
        if origin is not None:
            other = {key: value for key, value in keys.items() if written[key] != value}
            assert other.keys() <= {"architectures", "torch_dtype"} and (
                not other.get("architectures") or name == "bert"
            )


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_reads_the_same_from_both_names(tmp_path, name):
    """The configuration of transformers that is installed, of what was published and of what is written."""
    transformers = pytest.importorskip("transformers")
    keys = PUBLISHED[name] | {"architectures": None, "torch_dtype": "float32"}
    found = read(tmp_path / "in", keys)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(
        json.dumps(written_configuration(found, torch.float32, keys) | {"architectures": None})
    )
    first, second = (transformers.AutoConfig.from_pretrained(tmp_path / one).to_dict() for one in ("in", "out"))
    assert {**first, "_name_or_path": ""} == {**second, "_name_or_path": ""}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "attention_bias", True), ("llama", "mlp_bias", True), ("llama", "hidden_act", "gelu"),
        ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 2.0}), ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("llama", "rope_parameters", {"rope_theta": 1e4, "rope_type": "longrope"}),
        ("llama", "rope_parameters", {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}),
        ("llama", "rope_parameters", {"full_attention": {"rope_theta": 1e4}}),
        ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("llama", "rope_interleaved", True), ("llama", "quantization_config", {"bits": 4}),
        ("llama", "residual_multiplier", 0.5),
        ("llama", "num_hidden_layers", 2**31 - 1), ("gpt2", "n_layer", 2**31 - 1),
        ("llama", "num_hidden_layers", "3"), ("llama", "num_hidden_layers", None), ("llama", "num_hidden_layers", -3),
        ("llama", "architectures", ["GemmaForCausalLM"]), ("llama", "architectures", []),
        ("llama", "architectures", [["x"]]), ("llama", "model_type", "gemma"), ("llama", "model_type", ["llama"]),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "rope_parameters", {"rope_theta": 5e5, "rope_type": "default"}),
        ("llama", "rope_parameters", {**LLAMA_V4["rope_scaling"], "rope_theta": 1e4}),
        ("llama", "rope_parameters", {**LLAMA_V4["rope_scaling"], "factor": 4.0}),
        ("mistral", "sliding_window", 4096), ("mistral", "sliding_window", ...),
        ("qwen2", "use_sliding_window", True), ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("gpt2", "activation_function", "relu"), ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False), ("gpt2", "add_cross_attention", True),
        ("bert", "position_embedding_type", "relative_key"), ("bert", "type_vocab_size", 4),
        ("bert", "is_decoder", True), ("bert", "hidden_act", "relu"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_its_name(tmp_path, name, key, value):
    keys = PUBLISHED[name] | {key: value}
    keys = {one: what for one, what in keys.items() if what is not ...}
    if key == "architectures" and value == []:
        keys["model_type"] = "gemma"
    word = "architecture" if key == "architectures" else key
    with pytest.raises(ValueError, match=rf"config\.json: .*{word}"):
        read(tmp_path, keys)


def test_all_keys_that_are_not_known_are_told_at_once(tmp_path):
    keys = PUBLISHED["llama"] | {"first_of_mine": 0.5, "_model_name_or_path": "a/name", "second_of_mine": [1]}
    with pytest.raises(ValueError, match=r"config\.json: first_of_mine 0\.5, second_of_mine \[1\]: not supported"):
        read(tmp_path, keys)


def test_a_window_that_no_sequence_leaves_is_none(tmp_path):
    assert read(tmp_path, MISTRAL_V4 | {"sliding_window": 32768}) == read(tmp_path, MISTRAL_V4)


def test_a_model_type_that_is_no_name_is_refused_without_architectures(tmp_path):
    with pytest.raises(ValueError, match=r'config\.json: model_type \["llama"\] is not supported'):
        read(tmp_path, {"model_type": ["llama"]})


def test_both_names_of_the_rotary_positions_may_say_the_same(tmp_path):
    rope = LLAMA_V4["rope_scaling"] | {"rope_theta": 5e5}
    assert read(tmp_path, LLAMA_V4 | {"rope_parameters": rope}) == read(tmp_path, LLAMA_V4)


SCALED = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        # the base of rotary positions, at the top and in the parameters of either version
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None},
         r"rope_theta 500000\.0: contradicts that of rope_parameters or rope_scaling"),
        ("llama", {"rope_scaling": SCALED | {"rope_theta": 1e4}}, r"rope_theta 500000\.0: contradicts"),
        # the kind of scaling by its old name, and by both
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
         r'rope_scaling\.type "dynamic": is not supported; supported: default, linear'),
        ("llama", {"rope_scaling": SCALED | {"type": "llama3"}},
         r'rope_scaling\.type "llama3": contradicts rope_scaling\.rope_type "linear"'),
        ("llama", {"rope_scaling": {"type": 3, "factor": 2.0}}, r"rope_scaling\.type 3: must be of type str"),
        # the number of experts
        ("qwen3_moe", {"num_local_experts": 4, "num_experts": 8}, "num_local_experts 4: contradicts num_experts 8"),
        ("qwen3_moe", {"num_local_experts": 10**6}, "num_local_experts 1000000: must be"),
    ],
)  # fmt: skip
def test_what_two_keys_say_must_be_the_same_and_is_told_by_the_key_that_is_there(tmp_path, name, more, said):
    moe = {
        **QWEN2_V4, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": None,
    }  # fmt: skip
    keys = {"llama": LLAMA_V4, "qwen3_moe": moe}[name]
    with pytest.raises(ValueError, match=rf"config\.json: {said}"):
        read(tmp_path, keys | more)


def test_two_keys_that_say_the_same_are_one(tmp_path):
    scaled = LLAMA_V4["rope_scaling"]
    old = {key: value for key, value in scaled.items() if key != "rope_type"} | {"type": "llama3"}
    for rope in (scaled, old, old | {"rope_type": "llama3"}, scaled | {"rope_theta": 5e5}):
        assert read(tmp_path, LLAMA_V4 | {"rope_scaling": rope}) == read(tmp_path, LLAMA_V4)
    without = {key: value for key, value in LLAMA_V4.items() if key not in ("rope_theta", "rope_scaling")}
    told = read(tmp_path, without | {"rope_parameters": scaled | {"rope_theta": 5e5}})
    assert told == read(tmp_path, LLAMA_V4)


def test_a_gpt2_with_two_dropouts_is_read_and_written_as_it_was(tmp_path):
    keys = GPT2_V4 | {"embd_pdrop": 0.2}
    found = read(tmp_path, keys)
    assert found == read(tmp_path, GPT2_V4) and found.hidden_dropout == 0.1
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert other_dropout(tmp_path) == "embd_pdrop 0.2 and resid_pdrop 0.1"
    assert written_configuration(found, torch.float32, keys)["embd_pdrop"] == 0.2
    trained = GPTConfig(**{**vars(found), "hidden_dropout": 0.3})
    written = written_configuration(trained, torch.float32, keys)
    assert written["embd_pdrop"] == written["resid_pdrop"] == 0.3
    for other in (GPT2_V4, LLAMA_V4):
        (tmp_path / "config.json").write_text(json.dumps(other))
        assert other_dropout(tmp_path) == ""


def test_an_export_does_not_say_that_its_heads_are_interleaved(tmp_path):
    keys = LLAMA_V4 | {"rope_interleaved": True}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    found = read_configuration(tmp_path, interleaved=True)
    written = written_configuration(found, torch.float32, keys)
    assert "rope_interleaved" not in written and read(tmp_path, written) == found


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\x80", '{"a": ' + "9" * 5000 + "}"])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_configuration(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"normalization": "RMSNorm"}, "normalization='RMSNorm': GPT-2 has 'LayerNorm'"),
        ({"swiglu": True}, "swiglu=True"), ({"num_query_groups": 2}, "query_groups=2"),
        ({"kv_channels": 9}, "head_size=9"),
        ({"position_embedding_type": "rope"}, "normalization='LayerNorm': Llama has 'RMSNorm'"),
        ({"add_bias_linear": False}, "add_bias_linear=False"),
    ],
)  # fmt: skip
def test_a_model_that_transformers_lacks_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        written_configuration(GPTConfig(1, 16, 4, 9, 8, **change), torch.float32)


def test_the_head_of_a_task():
    shape = BERTConfig(1, 16, 4, 9, 8, norm_placement="post")
    head = TaskHead("classifier", "ForSequenceClassification", ("contradiction", "entailment", "neutral"))
    keys = written_configuration(shape, torch.float32, head=head)
    assert keys["architectures"] == ["BertForSequenceClassification"]
    assert keys["id2label"]["1"] == "entailment" and keys["label2id"]["neutral"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"num_local_experts": 2_000_000_000}, "num_local_experts 2000000000: must be"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9: must be at most num_local_experts 4"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1: is not supported"),
    ],
)
def test_experts_that_cannot_be(theirs, folder, changed, keys, said):
    theirs("Mixtral").save_pretrained(folder)
    changed(folder / "config.json", **keys)
    with pytest.raises(ValueError, match=f"config.json: {said}"):
        read_configuration(folder)
