"""Which class ``AutoTokenizer`` takes for a folder, as far as it is one of those that are read here.

transformers 5 builds the tokenizer of some classes anew, from the vocabulary and the merges of a ``tokenizer.json``
alone, so that the class decides how text is cut. The rules are those of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable

from .settings import MODEL, SettingError, Settings, own_name

#: the class that takes a tokenizer.json as it is, and the names that transformers has for it
PLAIN = "TokenizersBackend"
_PLAIN = {PLAIN, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}
#: the classes that are built here
GPT2, BERT, QWEN2, LLAMA = "GPT2Tokenizer", "BertTokenizer", "Qwen2Tokenizer", "LlamaTokenizer"
T5 = "T5Tokenizer"
BUILT = (GPT2, BERT, QWEN2, LLAMA, T5)
#: Mistral's own library reads these where it is installed and the folder has its file
_MISTRAL = "MistralCommonBackend"
MISTRALS_FILE = "tekken.json"

#: the class of each ``model_type`` of config.json; None: transformers has none for it, and takes what the files name
_OF_MODEL: dict[str, str | None] = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "codegen", "opt", "phi", "starcoder2"), GPT2),
    **dict.fromkeys(("bert", "megatron-bert", "distilbert", "electra", "squeezebert", "convbert"), BERT),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), QWEN2),
    **dict.fromkeys(("mistral", "mixtral"), _MISTRAL),
    **dict.fromkeys(("gpt_bigcode", "granite", "granitemoe", "olmo2", "olmo3", "stablelm", "phi3"), PLAIN),
    "t5": T5,
    **dict.fromkeys(("llama", ""), None),
}
#: the models whose files on the hub name a wrong class, so that the one above counts
_WRONG_ON_THE_HUB = {"qwen2", "phi3"}


def choose(settings: Settings, byte_level: Callable[[], bool]) -> str | None:
    """The class of a tokenizer: one of `BUILT`, or `PLAIN`; None if no file says anything.

    byte_level: whether there is a tokenizer.json that names ByteLevel. Raises SettingError for any other class.
    """
    model = settings.model_type or ""
    if model not in _OF_MODEL:
        where = settings.where.with_name(MODEL)
        known = ", ".join(name for name in _OF_MODEL if name)
        why = f"not known here which tokenizer transformers takes for it; known: {known}"
        raise SettingError(f"{where}: model_type {model}: {why}; {own_name('the tokenizer.json')}")
    of_model, declared = _OF_MODEL[model], settings.tokenizer_class or settings.model_class
    if of_model == _MISTRAL and settings.where.with_name(MISTRALS_FILE).is_file():
        raise settings.fault("model_type", f"{model}: has {MISTRALS_FILE}, which only Mistral's own library reads")
    if declared is None:
        return PLAIN if of_model == _MISTRAL else of_model
    stem = declared.removesuffix("Fast")
    wrong = model in _WRONG_ON_THE_HUB
    if stem == LLAMA and of_model != _MISTRAL and not wrong and byte_level():
        return PLAIN
    if of_model in (None, stem):
        return _known(settings, declared)
    if of_model in (PLAIN, _MISTRAL):
        return PLAIN
    return of_model if wrong else _known(settings, declared)


def _known(settings: Settings, name: str) -> str:
    if name in _PLAIN or name.removesuffix("Fast") in _PLAIN:
        return PLAIN
    if name.removesuffix("Fast") in BUILT:
        return name.removesuffix("Fast")
    valid = ", ".join((*BUILT, "PreTrainedTokenizerFast"))
    raise settings.fault(
        "tokenizer_class", f"{name}: is not read here; read: {valid}; {own_name('the tokenizer.json')}"
    )
