"""The ids at which ``generate`` of transformers ends a text, from the files of a folder of Hugging Face."""

from __future__ import annotations

from pathlib import Path

from .settings import GENERATION, MODEL, SettingError, read_object

#: keys of generation_config.json that change a greedy text, which only a flag of `trainers.generate` does here, and the
#: values that change nothing
_CHANGING = {
    "repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0), "bad_words_ids": (None, []),
    "suppress_tokens": (None, []), "begin_suppress_tokens": (None, []), "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,), "min_length": (None, 0), "min_new_tokens": (None, 0), "stop_strings": (None, []),
    "num_beams": (None, 1), "penalty_alpha": (None,), "guidance_scale": (None, 1.0), "sequence_bias": (None,),
    "exponential_decay_length_penalty": (None,),
}  # fmt: skip


def end_tokens(folder: Path) -> list[int] | None:
    """The ids of ``eos_token_id`` in generation_config.json, or without that file in config.json; [] for none.

    None if neither is there: then the folder says nothing about a model. Raises SettingError that names the file.
    """
    path = next((folder / name for name in (GENERATION, MODEL) if (folder / name).is_file()), None)
    if path is None:
        return None
    value = read_object(path).get("eos_token_id")
    found = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(one) is int and one >= 0 for one in found):
        raise SettingError(f"{path}: eos_token_id {str(value)[:100]}: must be the number of a token, or a list of them")
    return list(dict.fromkeys(found))


def not_taken(folder: Path, repetition_penalty: float = 1.0) -> str:
    """The line that names what generation_config.json asks for, and what changes no text here; "" for nothing.

    repetition_penalty: the one that the user has given. Raises SettingError if the file is damaged.
    """
    path = folder / GENERATION
    if not path.is_file():
        return ""
    values = read_object(path)
    asked = {key: values[key] for key, same in _CHANGING.items() if key in values and values[key] not in same}
    if asked.get("repetition_penalty") == repetition_penalty:
        del asked["repetition_penalty"]
    if not asked:
        return ""
    said = ", ".join(f"{key} {value}"[:60] for key, value in asked.items())
    return f"{path}: asks for {said}, with which transformers writes other texts; here flags alone decide"
