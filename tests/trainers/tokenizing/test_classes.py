"""The class of a folder's tokenizer: the table is that of transformers, and what is not in it is refused by name."""

import pytest

from trainers.tokenizing import classes
from trainers.tokenizing.settings import Settings


def choose(tmp_path, model=None, declared=None, of_model=None, byte_level=False):
    settings = Settings(tmp_path / "tokenizer_config.json", values={"tokenizer_class": declared})
    settings.model_type, settings.model_class = model, of_model
    return classes.choose(settings, lambda: byte_level)


@pytest.mark.slow
def test_the_table_is_that_of_transformers():
    """Of version 5: the classes of models, and which of them win over a class that a file names."""
    pytest.importorskip("transformers", minversion="5")
    from transformers.models.auto import tokenization_auto as auto

    theirs = {name: auto.TOKENIZER_MAPPING_NAMES.get(name) for name in classes._OF_MODEL if name}
    if auto.is_mistral_common_available():
        pytest.skip("Mistral's library is installed, with which transformers takes other classes")
    ours = {name: classes.PLAIN if one == classes._MISTRAL else one for name, one in classes._OF_MODEL.items() if name}
    assert theirs == ours
    assert auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS & set(theirs) == classes._WRONG_ON_THE_HUB


def test_a_class_is_taken_from_the_files_in_this_order(tmp_path):
    assert choose(tmp_path) is None and choose(tmp_path, "llama") is None
    assert choose(tmp_path, "gpt2") == classes.GPT2 and choose(tmp_path, "mistral") == classes.PLAIN
    assert choose(tmp_path, "gpt2", "PreTrainedTokenizerFast") == classes.PLAIN
    assert choose(tmp_path, "qwen2", "PreTrainedTokenizerFast") == classes.QWEN2  # known to be wrong on the hub
    assert choose(tmp_path, "qwen3", "PreTrainedTokenizerFast") == classes.PLAIN
    assert choose(tmp_path, "t5") == choose(tmp_path, "llama", "T5TokenizerFast") == classes.T5
    assert choose(tmp_path, "llama", "LlamaTokenizerFast") == classes.LLAMA
    assert choose(tmp_path, "llama", "LlamaTokenizerFast", byte_level=True) == classes.PLAIN  # as of Llama 3
    assert choose(tmp_path, "mistral", "LlamaTokenizer") == classes.PLAIN
    assert choose(tmp_path, "bert", None, "BertTokenizer") == choose(tmp_path, "llama", "BertTokenizer") == classes.BERT


@pytest.mark.parametrize(
    "model,declared,words",
    [
        ("llama", "XLNetTokenizerFast", r"tokenizer_config\.json: tokenizer_class XLNetTokenizerFast: is not read"),
        ("falcon", None, r"config\.json: model_type falcon: not known here .* copy it under another name"),
    ],
)
def test_another_class_is_refused_by_name(tmp_path, model, declared, words):
    with pytest.raises(ValueError, match=words):
        choose(tmp_path, model, declared)


def test_the_file_of_mistrals_own_library_is_refused(tmp_path):
    (tmp_path / classes.MISTRALS_FILE).touch()
    with pytest.raises(ValueError, match="which only Mistral's own library reads"):
        choose(tmp_path, "mistral")
