"""The files beside a tokenizer: which one wins, and what is refused by the names of file and key."""

import json

import pytest

from trainers.tokenizing.settings import beside


def write(folder, **files):
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / "tokenizer.json"


def test_the_map_of_special_tokens_wins_unless_all_added_tokens_are_listed(tmp_path):
    path = write(tmp_path, tokenizer_config__json={"eos_token": "a"}, special_tokens_map__json={"eos_token": "b"})
    assert beside(path).values["eos_token"] == "b"
    write(tmp_path, tokenizer_config__json={"eos_token": "a", "added_tokens_decoder": {"5": {"content": "a"}}})
    found = beside(path)
    assert found.values["eos_token"] == "a" and found.added[5].content == "a" and found.complete


def test_a_file_of_another_name_has_nothing_beside_it(tmp_path):
    write(tmp_path, tokenizer_config__json={"eos_token": "a"}, **{"x-tokenizer_config__json": {"eos_token": "c"}})
    assert beside(tmp_path / "tokenizer.json").stated and not beside(tmp_path / "mine.json").stated
    assert beside(tmp_path / "x-tokenizer.json").values["eos_token"] == "c"
    assert not beside(tmp_path / "y-tokenizer.json").stated


def test_a_vocabulary_of_berts_may_have_any_name(tmp_path):
    write(tmp_path, tokenizer_config__json={"do_lower_case": False}, **{"bert-cased-vocab__txt": ""})
    assert beside(tmp_path / "bert-cased-vocab.txt").values == {"do_lower_case": False}
    assert beside(tmp_path / "words.txt").stated
    write(tmp_path, vocab__txt="")  # then the others are another tokenizer's
    assert not beside(tmp_path / "words.txt").stated and not beside(tmp_path / "bert-cased-vocab.txt").stated


def test_a_file_of_a_template_wins(tmp_path):
    path = write(tmp_path, tokenizer_config__json={"chat_template": "one"})
    assert beside(path).values["chat_template"] == "one"
    write(tmp_path, chat_template__jinja="two")
    assert beside(path).values["chat_template"] == "two"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("three")
    assert beside(path).values["chat_template"] == {"default": "two", "tool_use": "three"}


@pytest.mark.parametrize(
    "files,words",
    [
        ({"tokenizer_config__json": {"auto_map": {"AutoTokenizer": ["a.B", None]}}}, "tokenizer_config.json: auto_map"),
        ({"tokenizer_config__json": {"fix_mistral_regex": True}}, "tokenizer_config.json: fix_mistral_regex true"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"1": "a"}}}, "config.json: added_tokens_decoder"),
        ({"tokenizer_config__json": {"eos_token": {"__type": "AddedToken", "content": 1}}}, "config.json: eos_token"),
        ({"tokenizer_config__json": "[]"}, "tokenizer_config.json: damaged: want an object"),
        ({"special_tokens_map__json": {"eos_token": {"content": "a", "lstrip": "no"}}}, "map.json: eos_token"),
        ({"added_tokens__json": {"a": "1"}}, "added_tokens.json: 'a' \"1\": want a number"),
        ({"config__json": {"model_type": 3}}, "config.json: model_type 3: must be a string"),
    ],
)  # fmt: skip
def test_refused_by_the_name_of_the_file(tmp_path, files, words):
    with pytest.raises(ValueError) as caught:
        beside(write(tmp_path, **files))
    assert words in str(caught.value) and str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)
