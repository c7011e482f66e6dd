"""Settings beside a vocab.txt, and beside vocab.json with merges.txt: known ids. Drawn ones are in test_reading."""

import json

import pytest

from trainers.data.tokenizer import Tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "schon", "schön", "Schön", "漢字", "漢", "字", "<s>"]


def bert(folder, text, **settings):
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_file(folder / "vocab.txt").encode(text)


@pytest.mark.parametrize(
    "settings,text,ids",
    [
        ({}, "Schön", [5]),
        ({"do_lower_case": True, "strip_accents": False}, "Schön", [6]),
        ({"do_lower_case": False}, "Schön", [7]),
        ({"do_lower_case": False, "strip_accents": True}, "schön", [5]),
        ({}, "漢字", [9, 10]),
        ({"tokenize_chinese_chars": False}, "漢字", [8]),
    ],
)
def test_settings_of_a_vocab_txt(tmp_path, settings, text, ids):
    assert bert(tmp_path, text, **settings) == ids


def test_a_setting_that_is_no_flag_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: do_lower_case \"no\": must be true or false"):
        bert(tmp_path, "x", do_lower_case="no")
    with pytest.raises(ValueError, match="cls_token null: a BertTokenizer needs this token"):
        bert(tmp_path, "x", cls_token=None)


def test_the_tokens_around_a_text_are_those_of_the_files(tmp_path):
    bert(tmp_path, "schon", cls_token="<s>")
    assert Tokenizer.from_file(tmp_path / "vocab.txt").encode_around("schon") == [11, 5, 3]


def test_settings_of_a_vocab_json(tmp_path):
    trained = json.loads(Tokenizer.train_bpe(["the cat the cat"], 262).to_bytes())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(trained["vocab"]))
    merges = [one if isinstance(one, str) else " ".join(one) for one in trained["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    plain = Tokenizer.from_file(tmp_path / "vocab.json")
    size = plain.vocab_size
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True, "add_bos_token": True}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|u|>": size, "<|im_end|>": size + 1}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    found = Tokenizer.from_file(tmp_path / "vocab.json")
    assert found.encode("the") == plain.encode(" the") != plain.encode("the")
    assert found.encode_around("the<|u|>") == [found.eod - found.eod, *plain.encode(" the"), size]
    assert (found.eod, found.vocab_size) == (size + 1, size + 2)
    same = Tokenizer.from_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert same.settings() == found.settings()
