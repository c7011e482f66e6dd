"""A folder's tokenizer here and by ``AutoTokenizer``: equal in every respect, refused by name, or wrong."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.tokenizers.drawing import TEXTS
from trainers.data.tokenizer import Tokenizer
from trainers.tokenizing.ends import end_tokens
from trainers.weights.tokenizer_files import tokenizer_file, written_tokenizer

CHATS = [
    [{"role": "user", "content": " Hi <|u|>\n"}],
    [{"role": "system", "content": "be"}, {"role": "user", "content": 'the "cat"'},
     {"role": "assistant", "content": "sat é"}],
]  # fmt: skip


def their_ends(folder: Path) -> list[int] | None:
    """The ids at which ``generate`` of a model in the folder stops: its own way to read them."""
    from transformers import GenerationConfig

    if not (folder / "config.json").is_file():
        return None
    try:
        found = GenerationConfig.from_pretrained(folder)
    except OSError:
        found = GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)
    value = found.eos_token_id
    return [] if value is None else list(dict.fromkeys(value if isinstance(value, list) else [value]))


def compare(folder: Path, name: str | None = None) -> tuple[str, str]:
    """("equal", "refused", "theirs fails", "both fail" or "wrong"; why).

    name: the file of the folder that is read; None for what a reader of folders takes.
    """
    from transformers import AutoTokenizer

    problem, theirs = "", None
    try:
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:150]
    file = tokenizer_file(folder) if name is None else str(folder / name)
    try:
        if file is None:
            raise ValueError(f"{folder}: no tokenizer")
        ours = Tokenizer.from_file(file)
    except ValueError as error:
        if not str(error).startswith(str(folder)):
            return "wrong", f"a refusal without a name: {error}"
        return ("both fail" if theirs is None else "refused"), str(error).replace(f"{folder}/", "")[:300]
    if theirs is None:
        return "theirs fails", problem
    faults = list(_differences(folder, ours, theirs))
    return ("wrong", "; ".join(faults[:3])[:600]) if faults else ("equal", "")


def told(what: str, here: Any, there: Any) -> Iterator[str]:
    """One fault where the two differ."""
    if here != there:
        yield f"{what}: {str(here)[:150]}, and transformers {str(there)[:150]}"


def _differences(folder: Path, ours: Tokenizer, theirs: Any) -> Iterator[str]:
    yield from told("vocabulary", ours.vocabulary(), theirs.get_vocab())
    for text in TEXTS:
        yield from _ids(repr(text), ours, theirs, text)
    draw, size = random.Random(str(folder.name)), ours.vocab_size
    for _ in range(6):
        ids = [draw.randrange(size) for _ in range(12)]
        for special in (True, False):
            mine, other = ours.decode(ids, special=special), theirs.decode(ids, skip_special_tokens=not special)
            yield from told(f"text of {ids}", mine, other)
    named = {} if theirs.special_tokens_map is None else dict(theirs.special_tokens_map)
    settings = ours.settings()
    if settings is not None or theirs.eos_token is not None:
        yield from told("end token", ours.end_token, theirs.eos_token)
        yield from told("first token", ours.start_token, theirs.bos_token or theirs.eos_token)
        known = {key: value for key, value in (settings or {}).items() if key.endswith("_token")}
        yield from told("named tokens", known, named)
        yield from told(
            "extra tokens", list((settings or {}).get("extra_special_tokens", [])), theirs.extra_special_tokens
        )
        if theirs.eos_token is not None:
            yield from told("end id", ours.eod, theirs.eos_token_id)
    else:
        yield from told("first token of the files", ours.begin_token, theirs.bos_token)
    yield from told("ends", end_tokens(folder), their_ends(folder))
    yield from told("template", ours.chat_template, theirs.chat_template)
    if theirs.chat_template is not None:
        yield from _chats(ours, theirs)
    if ours.settings() is not None:  # a guessed end would be stated there
        yield from _written(folder, ours)


def _ids(what: str, ours: Tokenizer, theirs: Any, text: str) -> Iterator[str]:
    ways = {
        "around": (lambda: ours.encode_around(text), {}),
        "bare": (lambda: ours.encode_around(text, around=False), {"add_special_tokens": False}),
        "as letters": (lambda: ours.encode(text), {"add_special_tokens": False, "split_special_tokens": True}),
    }
    for name, (mine, how) in ways.items():
        try:
            there: Any = list(theirs(text, **how)["input_ids"])
        except Exception:
            there = None
        try:
            here: Any = mine()
        except ValueError:
            here = None
        if here != there:
            yield f"{what} {name}: {here}, and transformers {there}"


def _chats(ours: Tokenizer, theirs: Any) -> Iterator[str]:
    for chat in CHATS:
        for answer in (True, False):
            there, here = (
                _chat(lambda chat=chat, answer=answer: theirs.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=answer)),
                _chat(lambda chat=chat, answer=answer: ours.chat(chat, answer=answer)),
            )  # fmt: skip
            if here != there:
                yield f"chat: {here!r}, and transformers {there!r}"
            elif here is not None:
                yield from _ids("a chat", ours, theirs, here)


def _chat(make: Any) -> Any:
    """A chat as text; None if the template cannot make one."""
    try:
        return make()
    except Exception:
        return None


def _written(folder: Path, ours: Tokenizer) -> Iterator[str]:
    """What we write for transformers, and beside a data set, is the same tokenizer again."""
    out = folder.with_name(f"{folder.name}-out")
    out.mkdir(exist_ok=True)
    for name, content in written_tokenizer(str(tokenizer_file(folder))).items():
        (out / name).write_bytes(content)
    again = Tokenizer.from_file(out / "tokenizer.json")
    for text in TEXTS:
        for around in (True, False):
            here, there = _tried(again, text, around), _tried(ours, text, around)
            if here != there:
                yield f"written and read again {text!r}: {here}, was {there}"
    ends, were = ((one.end_token, one.start_token) for one in (again, ours))
    if ends != were:
        yield f"written and read again: ends {ends}, were {were}"


def _tried(one: Tokenizer, text: str, around: bool) -> Any:
    try:
        return one.encode_around(text, around=around)
    except ValueError:
        return None


def files(folder: Path) -> str:
    """The files of a folder without its vocabulary, for people."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("merges.txt", "vocab.txt", "vocab.json"):
            text = path.read_text()
            if path.name == "tokenizer.json":
                content = json.loads(text)
                content["model"] = {"type": content["model"].get("type")}
                text = json.dumps(content)
            found[path.name] = text
    return "\n".join(f"  {name}: {text}" for name, text in found.items())
