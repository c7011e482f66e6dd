"""Where texts end by the files of a folder, and what these ask for in vain."""

import itertools
import json

import pytest

from tests.support.tokenizers.comparing import their_ends
from trainers.tokenizing.ends import end_tokens, not_taken
from trainers.tokenizing.settings import GENERATION, MODEL

ABSENT = object()
VALUES = (ABSENT, None, 3, [3], [4, 3, 4])


@pytest.mark.slow
def test_ends_are_those_of_generate(tmp_path):
    """Both files, each of them alone, with every form of value."""
    pytest.importorskip("transformers", minversion="5")
    for number, (model, generation) in enumerate(itertools.product(VALUES, [*VALUES, "no file"])):
        folder = tmp_path / str(number)
        folder.mkdir()
        keys = {"model_type": "llama"} | ({} if model is ABSENT else {"eos_token_id": model})
        (folder / MODEL).write_text(json.dumps(keys))
        if generation != "no file":
            said = {} if generation is ABSENT else {"eos_token_id": generation}
            (folder / GENERATION).write_text(json.dumps(said))
        assert end_tokens(folder) == their_ends(folder), (model, generation)


def test_a_folder_without_a_model_says_nothing(tmp_path):
    assert end_tokens(tmp_path) is None


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [1, None], {"a": 1}])
def test_a_value_that_is_no_token_is_named(tmp_path, value):
    (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id .*: must be the number of a token"):
        end_tokens(tmp_path)


def test_what_changes_texts_of_transformers_alone_is_told(tmp_path):
    assert not_taken(tmp_path) == ""
    asked = {"repetition_penalty": 1.2, "num_beams": 1, "suppress_tokens": [5], "temperature": 0.7, "min_length": None}
    (tmp_path / GENERATION).write_text(json.dumps(asked))
    assert "asks for repetition_penalty 1.2, suppress_tokens [5], with" in not_taken(tmp_path)
    assert "asks for suppress_tokens [5], with" in not_taken(tmp_path, repetition_penalty=1.2)
    (tmp_path / GENERATION).write_text(json.dumps({"num_beams": 1}))
    assert not_taken(tmp_path) == ""
