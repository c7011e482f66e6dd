"""A tokenizer's file with the files beside it, as one backend of ``tokenizers`` and the names of its tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers, processors

from commengine.files.reading import read_text

from . import classes
from .backends import KINDS, bert_frame, t5_frame
from .ends import end_tokens
from .settings import NAMES, SettingError, Settings, beside, own_name

#: bytes of the largest tokenizer.json
MOST = 1 << 30
#: GPT-2's vocabulary, and the file beside it with its merges
VOCABULARY, MERGES = "vocab.json", "merges.txt"


@dataclass(frozen=True)
class Told:
    """What is known of a tokenizer besides its backend.

    names: the tokens that have a name, such as ``eos_token``; transformers calls it ``special_tokens_map``. extra:
    those that are special without a name. stated: whether files, or the class that they choose, say the names; if not,
    a missing name means nothing. end: what config.json says in that case. split: whether special tokens in a text count
    as letters. tidy: whether the blank before a sign of punctuation is dropped from a decoded text. template: of a
    chat, or several by name.
    """

    names: Mapping[str, str]
    extra: Sequence[str] = ()
    stated: bool = False
    end: str | None = None
    split: bool = False
    tidy: bool = False
    template: str | Mapping[str, str] | None = None

    def config(self) -> dict[str, Any]:
        """The tokenizer_config.json with which the backend, as a tokenizer.json, is this tokenizer."""
        found: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": self.tidy,
        }
        found |= self.names
        if self.extra:
            found["extra_special_tokens"] = list(self.extra)
        if self.split:
            found["split_special_tokens"] = True
        if isinstance(self.template, Mapping):
            found["chat_template"] = [{"name": name, "template": one} for name, one in self.template.items()]
        elif self.template is not None:
            found["chat_template"] = self.template
        return found


def read(path: Path, *, lowercase: bool | None = None) -> tuple[tokenizers.Tokenizer, Told]:
    """The tokenizer in a tokenizer.json, vocab.txt or vocab.json (with merges.txt), as ``AutoTokenizer`` gives it.

    path: other files of its folder count as far as `settings.beside` says. A tokenizer.json of another name is taken as
    it is, and so is any other .txt as BERT's. lowercase: of a vocab.txt, in place of ``do_lower_case``.

    Raises ValueError that names the file, and the key where one is at fault; and what `tokenizers` raises.
    """
    try:
        return _read(path, beside(path), lowercase)
    except (
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        UnicodeError,
    ) as error:  # of values that nobody has written
        raise SettingError(f"{path}: it or a file beside it is damaged: {str(error)[:100]!r}") from error


def _read(path: Path, settings: Settings, lowercase: bool | None) -> tuple[tokenizers.Tokenizer, Told]:
    """`read`, with what stands beside the file."""
    whole = path.suffix != ".txt" and path.name != VOCABULARY
    chosen = classes.choose(settings, lambda: whole and '"ByteLevel"' in read_text(path, MOST))
    if chosen is None:
        chosen = classes.PLAIN if whole else classes.BERT if path.suffix == ".txt" else classes.GPT2
        named = settings.stated or not whole
    else:
        named = settings.stated or chosen != classes.PLAIN
    if lowercase is not None and not whole:
        said = settings.flag("do_lower_case", lowercase)
        if said is not lowercase:
            raise settings.fault("do_lower_case", f"{json.dumps(said)}: contradicts --tokenizer-type")
        settings.values["do_lower_case"] = lowercase
    if whole:
        for key in ("add_bos_token", "add_eos_token"):
            settings.values.pop(key, None)
    backend = _plain(path, settings) if chosen == classes.PLAIN else _built(path, chosen, settings, whole=whole)
    names, extra = _names(settings)
    _add(backend, names, extra, settings)
    if chosen == classes.QWEN2:
        every = dict.fromkeys([*map(str, names.values()), *map(str, extra)])
        backend.add_tokens([AddedToken(token, special=True) for token in every])
    if chosen == classes.BERT:
        bert_frame(backend, settings)
    elif chosen == classes.T5:
        t5_frame(backend, settings)
    elif backend.post_processor is None or "add_bos_token" in settings.values or "add_eos_token" in settings.values:
        _frame(backend, names, settings)
    template = settings.values.get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    texts = template.values() if isinstance(template, dict) else [] if template is None else [template]
    if not all(isinstance(one, str) for one in texts):
        raise settings.fault("chat_template", f"{str(template)[:60]}: must be text, or a list of names with text")
    ends = end_tokens(path.parent) if named is False and path.name == "tokenizer.json" else None
    told = Told(
        {name: str(token) for name, token in names.items()}, tuple(map(str, extra)), named,
        backend.id_to_token(ends[0]) if ends else None,
        bool(settings.flag("split_special_tokens", False)), bool(settings.flag("clean_up_tokenization_spaces", False)),
        template,
    )  # fmt: skip
    return backend, told


def _plain(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    """A tokenizer.json as it is."""
    if path.suffix == ".txt" or path.name == VOCABULARY:
        raise settings.fault("tokenizer_class", f"of a tokenizer.json: {path.name} is none; name the tokenizer.json")
    found = tokenizers.Tokenizer.from_file(str(path))
    if not settings.complete:
        for number, token in found.get_added_tokens_decoder().items():
            settings.added[number] = settings.by_content[token.content] = token
    _padding(found, settings)
    return found


def _padding(file: tokenizers.Tokenizer, settings: Settings) -> None:
    """Take the token with which a tokenizer.json pads, where nothing else names one."""
    if file.padding is not None:
        settings.values.setdefault("pad_token", file.padding["pad_token"])


def _built(path: Path, chosen: str, settings: Settings, *, whole: bool) -> tokenizers.Tokenizer:
    """The tokenizer of one of `KINDS`, from the vocabulary and the merges in the files."""
    kind, merges, post = KINDS[chosen], [], None
    settings.values = dict(kind.tokens) | settings.values
    if whole:
        file = tokenizers.Tokenizer.from_file(str(path))  # it also finds faults of the file
        post = file.post_processor
        _padding(file, settings)
        content = json.loads(read_text(path, MOST))
        model = content["model"]
        if model.get("type", kind.model) != kind.model:
            why = f"{chosen}: needs a {kind.model}, and {path.name} has a {model['type']}"
            raise settings.fault("tokenizer_class", f"{why}; {own_name('the tokenizer.json')}")
        vocabulary = model["vocab"]
        merges = [tuple(one.split(" ") if isinstance(one, str) else one) for one in model.get("merges", ())]
        if not settings.complete:
            for one in content.get("added_tokens", ()):
                token = AddedToken(**{name: value for name, value in one.items() if name != "id"})
                settings.added[one["id"]] = settings.by_content[token.content] = token
    elif kind.model == "WordPiece" and path.suffix == ".txt":
        vocabulary = models.WordPiece.read_file(str(path))
    elif kind.model == "BPE" and path.suffix == ".json" and chosen != classes.LLAMA:
        vocabulary, merges = models.BPE.read_file(str(path), str(path.with_name(MERGES)))
    else:
        raise settings.fault("tokenizer_class", f"{chosen}: has no {path.name}; {own_name(path.name)}")
    if chosen == classes.BERT:
        for name in ("unk_token", "cls_token", "sep_token"):
            if settings.values[name] is None:
                raise settings.fault(name, "null: a BertTokenizer needs this token")
    found = kind.build(vocabulary, merges, settings)
    if post is not None:
        found.post_processor = post
    if chosen == classes.T5:
        known = content.get("normalizer") or {}
        steps = [one for one in known.get("normalizers", [known]) if "precompiled_charsmap" in one]
        if steps:
            found.normalizer = normalizers.Precompiled(base64.b64decode(steps[0]["precompiled_charsmap"]))
    return found


def _names(settings: Settings) -> tuple[dict[str, Any], list[Any]]:
    """The named tokens in the order of transformers, and the extra ones, with flags where a file has them."""
    names: dict[str, Any] = {}
    values = settings.values
    for key in NAMES:
        token = values.get(key)
        if token is not None:
            if not isinstance(token, str | AddedToken):
                raise settings.fault(key, f"{str(token)[:60]}: must be a token")
            names[key] = settings.by_content.get(str(token), token)
    late = {key: one for key, one in values.items() if key.endswith("_token") and isinstance(one, str | AddedToken)}
    for key, token in [*late.items(), *settings.specific.items()]:
        if key not in NAMES:
            if not isinstance(token, str | AddedToken):
                raise settings.fault(key, f"{str(token)[:60]}: must be a token")
            names[key] = token
    extra = values.get("extra_special_tokens", values.get("additional_special_tokens")) or []
    if not isinstance(extra, list) or not all(isinstance(one, str | AddedToken) for one in extra):
        raise settings.fault("extra_special_tokens", f"{str(extra)[:60]}: must be a list of tokens")
    return names, extra


def _add(backend: tokenizers.Tokenizer, names: Mapping[str, Any], extra: Sequence[Any], settings: Settings) -> None:
    """Add the tokens, those that the vocabulary lacks at its end; those that are there get these flags."""
    adding: list[Any] = [token for _, token in sorted(settings.added.items())]
    there = [*backend.get_added_tokens_decoder().values(), *adding]
    found = {token.content for token in there}
    for token in [*names.values(), *extra]:
        # One that is there with flags and without is added twice, so that the flags of the last one hold.
        if str(token) not in found and token not in adding:
            adding.append(token)
    # The backend keeps a token special that is added again without this flag. So its file must say it, too.
    special = {str(token) for token in names.values()} | {token.content for token in there if token.special}
    made = []
    for token in adding:
        one: AddedToken = AddedToken(token, special=True) if isinstance(token, str) else token
        if str(one) in special and not one.special:
            one.special = True
        made.append(one)
    backend.add_tokens(made)


def _frame(backend: tokenizers.Tokenizer, names: Mapping[str, Any], settings: Settings) -> None:
    """Put the tokens around a text that ``add_bos_token`` and ``add_eos_token`` ask for."""
    start = names.get("bos_token") if settings.flag("add_bos_token", False) else None
    end = names.get("eos_token") if settings.flag("add_eos_token", False) else None
    around = [str(token) for token in (start, end) if token is not None]
    first, last = (f"{start}:0 " if start is not None else ""), (f" {end}:0" if end is not None else "")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A:0{last}", pair=None, special_tokens=[(one, backend.token_to_id(one)) for one in around]
    )


__all__ = ["SettingError", "Told", "read"]
