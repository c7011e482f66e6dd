"""Files with which the library tokenizers panics, aborts or never ends are one error, and this process lives on."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from trainers.data import tokenizer_probe
from trainers.data.tokenizer import Tokenizer


def written(path, model, **parts):
    content = json.loads(tokenizers.Tokenizer(model).to_str()) | parts
    path.write_text(json.dumps(content))
    return path


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BAD = {
    "no charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "no end": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 200}},
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_would_end_the_process_is_refused_by_its_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tokenizer_probe, "SECONDS", 1)
    monkeypatch.setattr(tokenizer_probe, "BYTES", 1 << 30)
    path = written(tmp_path / "tokenizer.json", models.BPE({"a": 0}, []), **BAD[name])
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json") as caught:
        Tokenizer.from_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", [models.WordPiece({"a": 0}), models.Unigram([("a", -1.0)], None)])
def test_a_word_that_the_vocabulary_lacks_is_an_error_of_the_text(tmp_path, model):
    found = Tokenizer.from_file(written(tmp_path / "tokenizer.json", model))
    assert found.encode("a") == [0]
    for encode in (
        found.encode,
        lambda text: found.encode_batch([text]),
        lambda text: found.encode_with_offsets([text]),
    ):
        with pytest.raises(ValueError, match="the tokenizer cannot encode the text"):
            encode("\u6f22")


def test_a_usable_file_passes(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    path = tmp_path / "tokenizer.json"
    path.write_text(backend.to_str())
    tokenizer_probe.require_usable(path)
