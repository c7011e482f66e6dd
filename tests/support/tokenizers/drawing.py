"""Drawn folders of Hugging Face: a tokenizer of any kind, old and new files beside it, settings that contradict."""

import base64
import json
import random
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tests.support.tokenizers.sentencepiece import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the cat sat on the mat, the cat sat", "a dog and a cat\n\nsat there 12 times", "é漢字 \t mixed Schön",
    "don't they 've it's a U.S. matter , is n't it ?", "user assistant system <s> </s> 3.14 ü",
] * 5  # fmt: skip
#: texts that tell one setting from another
TEXTS = [
    "", " ", "the cat", " the cat", "The CAT  sat\n", "Schön naïve e\u0301", "漢字 a漢b", "don't is n't , U.S. ?",
    "12 345 6.7", "<s> the</s>", "a<|endoftext|> b", "<|u|>the cat<|end|>\n", "[CLS] the [MASK] cat[SEP]",
    " <x> <y>cat", "x\u00a0y\tz \u200d", "🙂 ü\x00", "<img>the<IMG>", "\u2581the \u2581",
    "\uff33 the\uff33",
]  # fmt: skip
#: SentencePiece's own form of the rule that a wide S is an S (``normalization_rule_tsv``), as base64 of zlib's
_WIDE_S = (
    "eNod0lWUlgUUBdBvDSy6W+lGSUGQ7m5EOpWUEpDu7m5QWukemqGkRhpJBYNQ6aFByf1z1tov5+U+3BNED4Jge7Qg6lVYEBEZFoSnDUIZEqpjEo"
    "PYxCIucYhPPBKSgMQkIilJSE4yUpKCD0hFaj4kdCIN6UlHRjKQmUxkJQvZycZH5CAnH5ObXOQlD5+QjwLkpyCf8hmFKEJhilGUEhSnFCUpQ2nK"
    "UZYKlKcSFalCZapRlRpUpxY1qUNt6vI59fiCBtSnEQ1pQmOa0ZQWNOdLWtKKr2hDa9rRlq9pT0c60JlOfEMXutGVb+lOT3rQm170pQ/96cdABj"
    "CYQQwNPZzhDGMkIxjNKMYyhvGMYyITmMwkpjKF6UxjJjOYzSzmMofvmMd8vmchC1jMIpayhB/5geUsYyUrWM0q1rKG9axjIxsIZxNb2Mw2trIj"
    "NHF2sZPdRLCXPexnHwf4iUMc5AiH+ZlIjnGUExznFCc5w2nO8gvnOcdFLvArl7jMb/zOFf7kD67yF9e5xt/c4F/+4RY3ucNt7nGXKO7zkAc85h"
    "FPecJznvEfL3jJ/7zmFW9583637wB4qoVL"
)
#: tokens that the files of a folder may name, and some of a chat
SPECIALS = ["<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<|u|>", "<|end|>"]
BERTS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEMPLATES = [
    "{% for m in messages %}<|u|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|u|>assistant\n{% endif %}",
    "{{ bos_token }}{%- for m in messages %}\n  {%- if m.role == 'user' -%} [INST] {{ m.content | trim }} [/INST]"
    "\n  {%- else -%} {% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}:{{ m | tojson }}{% endfor %}{{ pad_token }}",
    "{% if messages[0].role != 'user' %}{{ raise_exception('a user first') }}{% endif %}{{ messages[-1].content }}",
]
#: shapes of the smallest models, by ``model_type``
_SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
          "rms_norm_eps": 1e-5, "hidden_act": "silu"}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SMALL | {"architectures": ["LlamaForCausalLM"]},
    "mistral": _SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": _SMALL | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": _SMALL | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
}  # fmt: skip
#: models besides, of which only the name counts
NAMES = ["bert", "distilbert", "gpt_bigcode", "phi3", "t5", "falcon"]
#: a class as files name it, and how often
CLASSES = {
    "byte": ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast"],
    "blank": ["LlamaTokenizer", "LlamaTokenizerFast", "LlamaTokenizerFast"],
    "WordPiece": ["BertTokenizer", "BertTokenizerFast", "BertTokenizer"],
    "WordLevel": ["PreTrainedTokenizerFast"],
    "Unigram": ["PreTrainedTokenizerFast", "LlamaTokenizer", "T5TokenizerFast"],
}  # fmt: skip
KINDS = list(CLASSES)


@lru_cache
def learnt(kind: str) -> str:
    """A trained tokenizer of a kind, as JSON."""
    found: tokenizers.Tokenizer
    trainer: Any
    if kind == "blank":
        return str(sentencepiece(CORPUS, 90, start=False).to_str())
    if kind == "byte":
        found = tokenizers.Tokenizer(models.BPE())
        found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    elif kind == "WordPiece":
        found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        found.normalizer, found.pre_tokenizer = (
            normalizers.BertNormalizer(lowercase=False),
            pre_tokenizers.BertPreTokenizer(),
        )
        found.decoder = decoders.WordPiece(prefix="##")
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=BERTS, show_progress=False)
    elif kind == "WordLevel":
        found = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        found.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(vocab_size=60, special_tokens=["<unk>", "<s>"], show_progress=False)
    else:
        found = tokenizers.Tokenizer(models.Unigram())
        found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        )
    found.train_from_iterator(CORPUS, trainer)
    return str(found.to_str())


def flags(draw: random.Random, content: str) -> dict[str, Any]:
    """A token with drawn flags, as the files write it."""
    found: dict[str, Any] = {"content": content}
    for name, chance in (("lstrip", 0.2), ("normalized", 0.3), ("rstrip", 0.2), ("single_word", 0.1)):
        found[name] = draw.random() < chance
    return found


def backend(draw: random.Random, kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of a kind with drawn parts and added tokens."""
    found = tokenizers.Tokenizer.from_str(learnt(kind))
    if kind in ("WordPiece", "WordLevel", "Unigram") and draw.random() < 0.5:
        choices = [
            normalizers.Lowercase(), normalizers.NFC(), normalizers.StripAccents(),
            normalizers.BertNormalizer(lowercase=draw.random() < 0.5),
            normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
        ]  # fmt: skip
        if kind == "Unigram":
            choices += [normalizers.Precompiled(zlib.decompress(base64.b64decode(_WIDE_S)))] * len(choices)
        found.normalizer = draw.choice(choices)
    if kind == "byte" and draw.random() < 0.4:
        digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), "isolated")
        found.pre_tokenizer = draw.choice([
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        ])  # fmt: skip
    for token in draw.sample([*SPECIALS, "<x>", "<IMG>"], draw.randrange(7)):
        one = AddedToken(**flags(draw, token)) if draw.random() < 0.3 else AddedToken(token, normalized=False)
        if draw.random() < 0.85:
            found.add_special_tokens([one])
        else:
            found.add_tokens([one])
    added = [token.content for token in found.get_added_tokens_decoder().values()]
    if added and draw.random() < 0.5:
        first, last = draw.choice(added), draw.choice(added)
        template = draw.choice([f"{first} $A", f"{first} $A {last}", f"$A {last}"])
        found.post_processor = processors.TemplateProcessing(
            template, f"{template} $B", [(one, found.token_to_id(one)) for one in {first, last}]
        )
    if draw.random() < 0.15:
        found.enable_truncation(5)
    if draw.random() < 0.15:
        found.enable_padding(length=8, pad_token="<pad>")
    return found


def token(draw: random.Random, content: str, *, typed: bool) -> Any:
    """A token as a string, or with its flags. typed: with the mark that transformers 4 wrote."""
    if draw.random() < 0.6:
        return content
    return flags(draw, content) | ({"__type": "AddedToken"} if typed else {})


def named(draw: random.Random, kind: str, *, typed: bool) -> dict[str, Any]:
    """Drawn names of tokens: some of the vocabulary, some new, some null."""
    found: dict[str, Any] = {}
    pool = [*BERTS, "<s>"] if kind == "WordPiece" and draw.random() < 0.6 else SPECIALS
    for name, chance in (
        ("bos", 0.6),
        ("eos", 0.75),
        ("unk", 0.5),
        ("pad", 0.4),
        ("sep", 0.15),
        ("cls", 0.15),
        ("mask", 0.1),
    ):
        if draw.random() < chance:
            found[f"{name}_token"] = token(draw, draw.choice(pool), typed=typed) if draw.random() < 0.92 else None
    if draw.random() < 0.25:
        key = draw.choice(["additional_special_tokens", "extra_special_tokens"])
        found[key] = draw.sample(["<|u|>", "<|end|>", "<x>", "<y>", "<img>"], draw.randrange(1, 4))
        if key == "extra_special_tokens" and draw.random() < 0.3:
            found[key] = {f"{'abc'[n]}_token": one for n, one in enumerate(found[key])}
    if draw.random() < 0.08:
        found["image_token"] = "<img>"
    return found


def settings(draw: random.Random, kind: str) -> dict[str, Any]:
    """Drawn settings that change what a tokenizer does, or do not."""
    found: dict[str, Any] = {}
    for name, chance, values in (
        ("add_bos_token", 0.3, (True, False)), ("add_eos_token", 0.2, (True, False)),
        ("add_prefix_space", 0.3, (True, False, None)), ("do_lower_case", 0.4, (True, False)),
        ("strip_accents", 0.3, (True, False, None)), ("tokenize_chinese_chars", 0.3, (True, False)),
        ("legacy", 0.3, (True, False, None)), ("split_special_tokens", 0.06, (True, False)),
        ("clean_up_tokenization_spaces", 0.5, (True, False)), ("model_max_length", 0.5, (512, 10**30)),
        ("padding_side", 0.2, ("left", "right")), ("use_default_system_prompt", 0.1, (False,)),
        ("errors", 0.1, ("replace",)), ("never_split", 0.05, (["cat"],)), ("sp_model_kwargs", 0.1, ({},)),
    ):  # fmt: skip
        if draw.random() < chance:
            found[name] = draw.choice(values)
    if draw.random() < 0.75:
        found["tokenizer_class"] = draw.choice([*CLASSES[kind], "PreTrainedTokenizerFast", "PreTrainedTokenizerFast"])
    if draw.random() < 0.03:
        found["tokenizer_class"] = draw.choice(["T5TokenizerFast", "GPTNeoXTokenizerFast", "MyOwnTokenizer"])
    if draw.random() < 0.02:
        found["auto_map"] = {"AutoTokenizer": ["code.Slow", "code.Fast"]}
    return found


def ends(draw: random.Random, size: int) -> Any:
    """Drawn end tokens of a model: none, one, several."""
    return draw.choice([None, draw.randrange(size), draw.randrange(size), [draw.randrange(size)],
                        [draw.randrange(size), draw.randrange(size), 3]])  # fmt: skip


def model_files(draw: random.Random, kind: str, size: int) -> dict[str, Any]:
    """config.json and generation_config.json, or one of them, or none."""
    found: dict[str, Any] = {}
    if draw.random() < 0.8:
        likely = {
            "byte": ["gpt2", "gpt2", "qwen2", "qwen3", "llama"],
            "WordPiece": ["bert", "bert", "distilbert", "gpt2"],
            "Unigram": ["t5", "t5", "t5", "llama"],
        }
        name = draw.choice([*likely.get(kind, ["llama", "llama", "mistral"]), "llama", "mistral"])
        if draw.random() < 0.06:
            name = draw.choice(NAMES)
        config = {"model_type": name, "vocab_size": size} | MODELS.get(name, {})
        if draw.random() < 0.8:
            config["eos_token_id"] = ends(draw, size)
        if draw.random() < 0.1:
            config["tokenizer_class"] = draw.choice(CLASSES[kind])
        found["config.json"] = config
    if draw.random() < 0.5 and "config.json" in found:
        found["generation_config.json"] = {"_from_model_config": True, "transformers_version": "4.46.0"}
        if draw.random() < 0.85:
            found["generation_config.json"]["eos_token_id"] = ends(draw, size)
    return found


def _slow(draw: random.Random, kind: str, made: tokenizers.Tokenizer) -> dict[str, Any]:
    """A vocabulary in files of its own, as before tokenizer.json."""
    model = json.loads(made.to_str())["model"]
    if kind == "WordPiece":
        words = sorted(model["vocab"], key=model["vocab"].get)
        return {"vocab.txt": "\n".join([*words, *(["<s>"] if draw.random() < 0.3 else [])]) + "\n"}
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    vocabulary = model["vocab"] | ({"<|endoftext|>": len(model["vocab"])} if draw.random() < 0.7 else {})
    return {"vocab.json": vocabulary, "merges.txt": "\n".join(["#version: 0.2", *merges]) + "\n"}


def draw_folder(seed: int, number: int, folder: Path) -> str:
    """Write one drawn folder; returns what it is, for people. The same seed and number give the same files."""
    draw = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    made = backend(draw, kind)
    form = draw.choice(["5", "5", "saved", "4", "4", "3", "3", "bare"])
    if kind in ("byte", "WordPiece") and draw.random() < 0.3:
        form = "slow"
    size = made.get_vocab_size()
    files: dict[str, Any] = {"tokenizer.json": made.to_str()} | model_files(draw, kind, size)
    config = settings(draw, kind)
    if form == "slow":
        files |= _slow(draw, kind, made)
        del files["tokenizer.json"]
        if draw.random() < 0.8:  # without a class transformers cannot read such a folder
            config["tokenizer_class"] = draw.choice(CLASSES[kind][:2])
    if form == "bare":
        config = {}
    elif form == "5":  # transformers 5: plain strings, no other file
        files["tokenizer_config.json"] = config | {
            key: value["content"] if isinstance(value, dict) and "content" in value else value
            for key, value in named(draw, kind, typed=False).items()
        }
    elif form == "4":  # transformers 4.34 to 4.57: all added tokens with their flags
        names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        decoder = {
            str(at): {name: getattr(one, name) for name in names} for at, one in made.get_added_tokens_decoder().items()
        }
        if decoder and draw.random() < 0.3:
            del decoder[draw.choice(list(decoder))]
        if draw.random() < 0.3:
            decoder[str(size + draw.randrange(3))] = flags(draw, "<y>") | {"special": draw.random() < 0.5}
        files["tokenizer_config.json"] = config | named(draw, kind, typed=True) | {"added_tokens_decoder": decoder}
        if draw.random() < 0.7:
            files["special_tokens_map.json"] = named(draw, kind, typed=False)
    elif form in ("3", "slow"):  # before: three files
        if form == "slow" or draw.random() < 0.8:
            files["tokenizer_config.json"] = config | (named(draw, kind, typed=True) if draw.random() < 0.7 else {})
        if draw.random() < 0.7:
            files["special_tokens_map.json"] = named(draw, kind, typed=False)
        if draw.random() < 0.4:
            files["added_tokens.json"] = {
                one: size + n for n, one in enumerate(draw.sample(["<y>", "<x>", "<|u|>"], 2))
            }
    folder.mkdir(parents=True)
    if form == "saved":
        _save(draw, kind, made, folder, config)
        files = {name: one for name, one in files.items() if name.endswith("config.json")}
    if draw.random() < 0.5:
        _template(draw, files, folder)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    model = files.get("config.json", {})
    return f"{kind} {form} {model.get('model_type', '-')} {config.get('tokenizer_class', '-')}"


def _save(draw: random.Random, kind: str, made: tokenizers.Tokenizer, folder: Path, config: dict[str, Any]) -> None:
    """By ``save_pretrained`` of a class of transformers."""
    import transformers

    names = {
        key: value["content"] if isinstance(value, dict) and "content" in value else value
        for key, value in named(draw, kind, typed=False).items() if value is not None
    }  # fmt: skip
    left_out = ("tokenizer_class", "auto_map", "never_split")
    config = {key: value for key, value in config.items() if key not in left_out and value is not None}
    model = json.loads(made.to_str())["model"]
    if kind in ("byte", "WordPiece") and draw.random() < 0.5:
        name = draw.choice(["GPT2Tokenizer", "Qwen2Tokenizer"]) if kind == "byte" else "BertTokenizer"
        merges = {"merges": [tuple(one) for one in model["merges"]]} if kind == "byte" else {}
        found = getattr(transformers, name)(vocab=model["vocab"], **merges, **names, **config)
    else:
        found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names, **config)
    found.save_pretrained(folder)


def _template(draw: random.Random, files: dict[str, Any], folder: Path) -> None:
    """One template, or several, in the settings or in files; sometimes in both."""
    config = files.get("tokenizer_config.json")
    if config is not None and draw.random() < 0.7:
        several = [{"name": name, "template": draw.choice(TEMPLATES)} for name in ("default", "tool_use")]
        config["chat_template"] = several if draw.random() < 0.2 else draw.choice(TEMPLATES)
    if config is None or draw.random() < 0.4:
        files["chat_template.jinja"] = draw.choice(TEMPLATES)
        if draw.random() < 0.2:
            files["additional_chat_templates/tool_use.jinja"] = draw.choice(TEMPLATES)
