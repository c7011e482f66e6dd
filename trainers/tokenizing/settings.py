"""The files beside a tokenizer: what they say, in the order in which transformers lets one file win over another."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from commengine.files.reading import read_text

#: bytes of the largest of these files; that of Gemma 3 has 1.2 MB
MOST = 1 << 24
CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MODEL, GENERATION = "config.json", "generation_config.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"

#: the tokens that have a use by name, in the order in which transformers adds those that a vocabulary lacks
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: keys with which a file would choose other code, or be parts of the tokenizer itself
_REFUSED = (
    "auto_map", "fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "gguf_file", "vocab", "merges", "unk_id",
    "tokenizer_object", "post_processor", "tokenizer_padding", "tokenizer_truncation", "_spm_precompiled_charsmap",
)  # fmt: skip
#: the names of a tokenizer's own file, after a prefix that the files beside it share
_FILES = re.compile(r"(?P<prefix>(?:.*-)?)(?:tokenizer\.json|vocab\.txt)|vocab\.json")


class SettingError(ValueError):
    """A file beside a tokenizer asks for something that is not here. The message begins with the file and the key."""


@dataclass
class Settings:
    """What the files beside a tokenizer say.

    where: the file that an error names. values: the keys of `CONFIG`, over which `SPECIAL` wins; tokens with flags are
    ``AddedToken``. added: the tokens that are to be added, by number. by_content: the same by their text. specific: the
    tokens that only one model has. stated: whether `CONFIG` or `SPECIAL` is there. complete: `CONFIG` lists all added
    tokens. model_type, model_class: of `MODEL`.
    """

    where: Path
    values: dict[str, Any] = field(default_factory=dict)
    added: dict[int, AddedToken] = field(default_factory=dict)
    by_content: dict[str, AddedToken] = field(default_factory=dict)
    specific: dict[str, Any] = field(default_factory=dict)
    stated: bool = False
    complete: bool = False
    model_type: str | None = None
    model_class: str | None = None

    @property
    def tokenizer_class(self) -> str | None:
        """The class that `CONFIG` names."""
        return self.text("tokenizer_class")

    def fault(self, key: str, why: str) -> SettingError:
        """An error about a key. why: its value, what is wrong, and what would be valid."""
        return SettingError(f"{self.where}: {key} {why}")

    def text(self, key: str) -> str | None:
        """A string, or None. Raises SettingError for another value."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fault(key, f"{_shown(value)}: must be a string")
        return value

    def flag(self, key: str, default: bool | None) -> bool | None:
        """True or False, or ``default`` where the key is missing; null is None. Raises SettingError."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise self.fault(key, f"{_shown(value)}: must be true or false")
        return value

    def must(self, key: str, default: bool) -> bool:
        """True or False, where null is none of them. Raises SettingError."""
        value = self.flag(key, default)
        if value is None:
            raise self.fault(key, "null: must be true or false")
        return value


def beside(tokenizer: Path) -> Settings:
    """What the files beside ``tokenizer`` say; nothing beside a file of a name that transformers does not know.

    The files beside ``PREFIX-tokenizer.json`` have the same prefix. A .txt of another name, in a folder with no other
    tokenizer, counts as vocab.txt. Raises SettingError, which is a ValueError.
    """
    name = _FILES.fullmatch(tokenizer.name)
    folder, found = tokenizer.parent, Settings(tokenizer)
    # A vocabulary of BERT's has had many names; one that is the only one of its folder is that of the other files.
    lone = tokenizer.suffix == ".txt" and not any((folder / one).is_file() for one in ("vocab.txt", "tokenizer.json"))
    if name is None and not lone:
        return found
    prefix = "" if name is None or (lone and not (folder / f"{name['prefix']}{CONFIG}").is_file()) else name["prefix"]
    prefix = prefix or ""
    paths = {file: folder / f"{prefix}{file}" for file in (CONFIG, SPECIAL, ADDED)}
    found.where = paths[CONFIG]
    if not prefix and (folder / MODEL).is_file():
        model = read_object(folder / MODEL)
        for key in ("model_type", "tokenizer_class"):
            if not isinstance(model.get(key), str | None):
                raise SettingError(f"{folder / MODEL}: {key} {_shown(model[key])}: must be a string")
        found.model_type, found.model_class = model.get("model_type"), model.get("tokenizer_class")
    if paths[CONFIG].is_file():
        found.values, found.stated = read_object(paths[CONFIG]), True
    of_t5 = found.values.get("tokenizer_class") == "T5Tokenizer" and found.values.get("unk_id") == 2  # as each has
    for key in _REFUSED:
        if found.values.get(key) and not (of_t5 and key == "unk_id"):
            raise found.fault(key, f"{_shown(found.values[key])}: is not read here; {own_name('the tokenizer.json')}")
    _name(found)
    if "added_tokens_decoder" in found.values:
        _decode(found)
    else:
        _merge(found, paths)
    found.values = {key: _token(found, key, value) for key, value in found.values.items()}
    if not prefix:
        _templates(found, folder)
    return found


def own_name(file: str) -> str:
    """How a user has a tokenizer without the files beside it."""
    return f"to have {file} without the files beside it, copy it under another name"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError that names it."""
    try:  # not by read_json: transformers writes a model_max_length of more than 64 bits
        found = json.loads(read_text(path, MOST))
    except (ValueError, RecursionError) as error:
        raise SettingError(f"{path}: damaged: {str(error)[:100]}") from error
    if not isinstance(found, dict):
        raise SettingError(f"{path}: damaged: want an object, got {type(found).__name__}")
    return found


def _name(found: Settings) -> None:
    """Take the extra tokens, and those that only one model has, such as ``image_token``, out of the values."""
    values = found.values
    if "additional_special_tokens" in values and not values.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
    for key in [key for key in values if key.endswith("_token") and key not in NAMES and isinstance(values[key], str)]:
        found.specific[key] = values.pop(key)
    if isinstance(values.get("extra_special_tokens"), dict):
        found.specific |= values.pop("extra_special_tokens")


def _decode(found: Settings) -> None:
    """Take the added tokens of `CONFIG`. Then transformers reads neither `SPECIAL` nor `ADDED`."""
    key, found.complete = "added_tokens_decoder", True
    listed = found.values.pop(key)
    try:
        for number, token in listed.items():
            made = AddedToken(**{name: value for name, value in token.items() if name != "__type"})
            found.added[int(number)] = found.by_content[made.content] = made
    except (AttributeError, TypeError, ValueError) as error:
        raise found.fault(key, f"{_shown(listed)}: want tokens with their flags by number") from error


def _merge(found: Settings, paths: Mapping[str, Path]) -> None:
    """Let `SPECIAL` win over `CONFIG`, and take the tokens of `ADDED`."""
    values = found.values
    if paths[SPECIAL].is_file():
        found.stated = True
        for key, value in read_object(paths[SPECIAL]).items():
            token = value
            if key == "extra_special_tokens" and isinstance(value, list):
                there = list(values.get(key) or [])
                for one in value:
                    made = _flagged(paths[SPECIAL], key, one) if isinstance(one, dict) else one
                    there += [] if made in there else [made]
                token = there
            elif key != "extra_special_tokens" and isinstance(value, dict):
                token = _flagged(paths[SPECIAL], key, value)
            values[key] = token
        if isinstance(values.get("extra_special_tokens"), dict):
            found.specific |= values.pop("extra_special_tokens")
    if paths[ADDED].is_file():
        special = {str(values[key]) for key in NAMES if values.get(key)}
        special |= {str(token) for token in values.get("extra_special_tokens") or ()}
        for content, number in read_object(paths[ADDED]).items():
            if not isinstance(number, int):
                raise SettingError(f"{paths[ADDED]}: {content!r} {_shown(number)}: want a number for each token")
            token = AddedToken(content, normalized=content not in special, special=content in special)
            found.added[number] = found.by_content[content] = token


def _flagged(path: Path, key: str, value: Mapping[str, Any]) -> AddedToken:
    try:
        return AddedToken(**{name: one for name, one in value.items() if name != "special"}, special=True)
    except TypeError as error:
        raise SettingError(f"{path}: {key} {_shown(value)}: want a token with its flags") from error


def _token(found: Settings, key: str, value: Any) -> Any:
    """The value with an ``AddedToken`` for each object that says that it is one."""
    if isinstance(value, list):
        return [_token(found, key, one) for one in value]
    if not isinstance(value, dict) or value.get("__type") != "AddedToken":
        return value
    try:
        return AddedToken(**{name: one for name, one in value.items() if name != "__type"})
    except TypeError as error:
        raise found.fault(key, f"{_shown(value)}: want a token with its flags") from error


def _templates(found: Settings, folder: Path) -> None:
    """Take the templates of chats: those of files of their own win over that of `CONFIG`."""
    files = {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    files |= {path.name.removesuffix(".jinja"): path for path in sorted((folder / TEMPLATES).glob("*.jinja"))}
    templates = {name: read_text(path, MOST) for name, path in files.items()}
    if templates:
        found.values["chat_template"] = templates["default"] if templates.keys() == {"default"} else templates


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:100]
