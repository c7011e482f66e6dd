"""Tokenizer: text to token ids and back, by Hugging Face ``tokenizers``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trainers.tokenizing import chat, reading
from trainers.tokenizing.probe import require_usable
from trainers.tokenizing.reading import Told

from . import wordpiece
from .wordpiece import WordPieces

END_OF_DOCUMENT = "<|endoftext|>"
#: the tokens that end a document in the vocabularies of GPT-2, Qwen and SmolLM; of Llama 3; of Llama 2 and Mistral
END_OF_TEXT = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>")
#: the tokens of T5's vocabularies that stand for spans, by their numbers
SENTINEL = "<extra_id_{}>"
#: a byte of a character that SentencePiece's vocabulary does not have
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """A ``tokenizers.Tokenizer`` set up for language-model data.

    Text is encoded as it is: nothing is added around it, cut off or padded. A ``<|endoftext|>`` that is spelt out in a
    document is encoded as these characters, so that no document can end itself.

    told: what the files beside a tokenizer say (`trainers.tokenizing.reading.Told`).
    """

    def __init__(self, backend: tokenizers.Tokenizer, told: Told | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend, self._told = backend, Told({}) if told is None else told
        self._identity: str | None = None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, lowercase: bool | None = None) -> Self:
        """Read a ``tokenizer.json``, BERT's vocab.txt if the name ends in ``.txt``, or GPT-2's ``vocab.json``.

        The merges of a vocab.json are in ``merges.txt`` beside it, those of gpt2-vocab.json in gpt2-merges.txt. The
        files of settings beside a file count as for ``AutoTokenizer`` of transformers (`trainers.tokenizing`). Beside a
        tokenizer.json of another name are those of another tokenizer; beside ``PREFIX-tokenizer.json`` those with the
        same prefix count.
        lowercase: of a vocab.txt; None for what the settings say, and without them True.

        Raises FileNotFoundError, or ValueError if the file is not one, or if the settings ask for what is not here.
        """
        file = _existing(path)
        if file.suffix == ".txt":
            kind = "tokenizer.json, nor BERT's vocab.txt"
            with _told(f"{file}: not a {kind}"):
                with file.open(encoding="utf-8") as lines, _as_value_error(f"{file}: not a {kind}"):
                    WordPieces.of(wordpiece.read(list(lines)))
                return cls(*reading.read(file, lowercase=lowercase))
        if file.name == reading.VOCABULARY:
            beside = _existing(file.with_name(reading.MERGES))
            with _told(f"{file}, {beside}: not a BPE vocabulary and its merges"):
                return cls(*reading.read(file))
        if (merges := merges_beside(file)) is not None:
            return cls.from_gpt2(file, merges)
        require_usable(file)
        with _told(f"{file}: not a tokenizer.json"):
            return cls(*reading.read(file))

    @classmethod
    def from_gpt2(cls, encoder_json: str | os.PathLike[str], vocab_bpe: str | os.PathLike[str]) -> Self:
        """GPT-2's byte-level BPE from its vocabulary and its merges.

        If they have the names of `from_file` and lie in one folder, the settings beside them count.
        Raises FileNotFoundError, or ValueError if the two are not such files.
        """
        first, second = _existing(encoder_json), _existing(vocab_bpe)
        if first.name == reading.VOCABULARY and second.resolve() == first.with_name(reading.MERGES).resolve():
            return cls.from_file(first)
        vocab, merges = os.fspath(first), os.fspath(second)
        with _told(f"{vocab}, {merges}: not a BPE vocabulary and its merges"):
            backend = _byte_level(models.BPE.from_file(vocab, merges))
        if backend.token_to_id(END_OF_DOCUMENT) is not None:
            backend.add_special_tokens([END_OF_DOCUMENT])  # marks the entry; the vocabulary does not grow
        return cls(backend)

    @classmethod
    def from_vocab(cls, vocab_txt: str | os.PathLike[str], *, lowercase: bool | None = None) -> Self:
        """BERT's WordPiece tokenizer from a vocab.txt, a token a line; the number of a line, from 0, is the id.

        lowercase, errors: see `from_file`.
        """
        return cls.from_file(vocab_txt, lowercase=lowercase)

    @classmethod
    def train_wordpiece(cls, texts: Callable[[], Iterable[str]], vocab_size: int, *, lowercase: bool = True) -> Self:
        """Train a WordPiece vocabulary, as `trainers.data.wordpiece.train` does, and raise what it raises."""
        vocabulary = wordpiece.train(texts, vocab_size, lowercase=lowercase)
        return cls(wordpiece.backend(vocabulary, lowercase=lowercase))

    @classmethod
    def train_bpe(cls, iterator: Iterable[str], vocab_size: int) -> Self:
        """Train a byte-level BPE. The same texts give the same tokenizer.

        vocab_size: the largest number of tokens, ``<|endoftext|>`` (id 0) and the 256 bytes included. A small corpus
        may give fewer.
        """
        backend = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        wordpiece.train_on(backend, iterator, trainer)
        return cls(backend)

    def with_sentinels(self, count: int, vocab_size: int | None = None) -> Self:
        """This tokenizer with the sentinels of a T5 at the end of the vocabulary, the first one last.

        It is this one if it has sentinels. vocab_size: of the model; None for as many as there are tokens. count: of
        the sentinels; fewer if the vocabulary has not so much room. Ids between the tokens and the sentinels are
        unused. The `identity` stays. Raises ValueError where ids of this tokenizer are missing.
        """
        first = self.vocab_size
        last = first + count if vocab_size is None else vocab_size
        room = min(count, last - first)
        if room <= 0 or SENTINEL.format(0) in self.vocabulary():
            return self
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        unused = [f"<unused_{number}>" for number in range(first, last - room)]
        backend.add_special_tokens([*unused, *(SENTINEL.format(number) for number in reversed(range(room)))])
        if backend.token_to_id(SENTINEL.format(0)) != last - 1:
            raise ValueError(f"the tokenizer leaves out ids below {first}, so that sentinels have no place")
        made = type(self)(backend, self._told)
        made._identity = self.identity()
        return made

    @property
    def vocab_size(self) -> int:
        """The size of an embedding that holds every id: the largest id plus one."""
        return max(self.vocabulary().values()) + 1

    def vocabulary(self) -> dict[str, int]:
        """The id of every token, special and added ones included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def identity(self) -> str:
        """A digest that tells this vocabulary from others, whatever file it is read from: hexadecimal, 32 digits.

        It is made of all tokens and their ids, without sentinels that `with_sentinels` added.
        """
        if self._identity is not None:
            return self._identity
        digest = hashlib.sha256()
        for token, number in sorted(self.vocabulary().items()):
            digest.update(f"{number} {len(token)} {token}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()[:32]

    @property
    def eod(self) -> int:
        """The id of `end_token`. Raises ValueError if there is none."""
        end: int | None = None if self.end_token is None else self._backend.token_to_id(self.end_token)
        if end is None:
            if self._told.stated:
                raise ValueError("the files beside the tokenizer name no eos_token that ends a text")
            raise ValueError(f"the tokenizer has no {END_OF_DOCUMENT} token, nor {' or '.join(END_OF_TEXT[1:])}")
        return end

    @property
    def end_token(self) -> str | None:
        """The ``eos_token`` of the files; None if they name none.

        Where no file names tokens: that of the ``eos_token_id`` of config.json, or the first of `END_OF_TEXT` that the
        vocabulary has.
        """
        told = self._told
        if told.stated or "eos_token" in told.names:
            return told.names.get("eos_token")
        guessed = next((end for end in END_OF_TEXT if self._backend.token_to_id(end) is not None), None)
        return guessed if told.end is None else told.end

    @property
    def start_token(self) -> str | None:
        """The ``bos_token`` of the files, or `end_token`: the token before a text without a context.

        Where no file names tokens: the first one that the backend puts before a text, or `end_token`.
        """
        if not self._told.stated and (around := self._backend.encode("").tokens):
            return str(around[0])
        return self._told.names.get("bos_token", self.end_token)

    @property
    def begin_token(self) -> str | None:
        """The ``bos_token`` of the files; None if they name none."""
        return self._told.names.get("bos_token")

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The template of a chat, in Jinja's language; several by name; or None."""
        return self._told.template

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True, **values: Any) -> str:
        """A chat as one text, for `encode_around` with ``around=False``, by the tokenizer's template.

        messages: each with ``role`` and ``content``. answer: end with what begins the model's answer. values: more
        names that the template asks for. Raises ValueError if there is no template, or if it refuses the messages.
        """
        return chat.render(self._told, messages, answer=answer, **values)

    def wordpieces(self) -> WordPieces:
        """The tokens by their use in BERT's samples. Raises ValueError if [MASK], or one like it, is missing."""
        return WordPieces.of(self.vocabulary())

    @property
    def can_cut_text(self) -> bool:
        """Whether `trainers.data.text_files.cut` may cut a document without changing its tokens.

        True for byte-level BPE with GPT-2's pattern, unless an added token may lie on both sides of a cut. Other
        tokenizers are not examined, and get whole documents.
        """
        split = self._backend.pre_tokenizer
        return (
            isinstance(split, pre_tokenizers.ByteLevel)
            and split.use_regex
            and not split.add_prefix_space
            and self._backend.normalizer is None
            and self._added_tokens_end_at_white_space
        )

    @property
    def _added_tokens_end_at_white_space(self) -> bool:
        """Whether no added token that is found in text holds white space, or takes that which follows it.

        A special token is not found (``encode_special_tokens``), but hides others that overlap it.
        """
        added = self._backend.get_added_tokens_decoder().values()
        return all(token.special for token in added) or not any(
            token.rstrip or any(map(str.isspace, token.content)) for token in added
        )

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text``. Raises ValueError, as the other ones do, where the vocabulary lacks a token."""
        with _told():
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_around(self, text: str, *, around: bool = True) -> list[int]:
        """The token ids of ``text`` as transformers gives them: special tokens that are spelt out count as such.

        around: with the tokens that the tokenizer puts around a text, such as <s>.
        """
        self._backend.encode_special_tokens = self._told.split
        try:
            with _told():
                return list(self._backend.encode(text, add_special_tokens=around).ids)
        finally:
            self._backend.encode_special_tokens = True

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, on as many threads as ``RAYON_NUM_THREADS`` allows. It releases the GIL."""
        return list(self.iter_encode_batch(texts))

    def iter_encode_batch(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The same as `encode_batch`, with the list of ids of one text alive at a time."""
        with _told():
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        for encoding in found:
            yield encoding.ids

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """For each text its token ids, and the first character and the end of each token in the text."""
        with _told():
            found = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(one.ids, one.offsets) for one in found]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each id, as the vocabulary spells it."""
        return [str(self._backend.id_to_token(token)) for token in ids]

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """The text of ``ids``. special: with special tokens spelt out, and not left out."""
        text = str(self._backend.decode(list(ids), skip_special_tokens=not special))
        return tidied(text) if self.tidies else text

    @property
    def tidies(self) -> bool:
        """Whether `decode` drops blanks before signs: ``clean_up_tokenization_spaces``, which no BPE obeys."""
        return self._told.tidy and not isinstance(self._backend.model, models.BPE)

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """What ``ids`` add to the text of ``before``.

        It is not the text of ``ids`` alone, because some decoders (SentencePiece's) take the blank off a text's
        beginning. A character that ``before`` leaves unfinished counts as added.
        """
        prefix, whole = self.decode(before), self.decode([*before, *ids])
        while not whole.startswith(prefix):
            prefix = prefix[:-1]
        return whole[len(prefix) :]

    def bytes_at_end(self, ids: Sequence[int]) -> int:
        """How many of the last ids are single bytes of a run that the decoder reads as a whole (SentencePiece's).

        The run's text may change until a token follows that is no byte.
        """
        return next((n for n, one in enumerate(reversed(ids)) if not _BYTE.fullmatch(self.tokens([one])[0])), len(ids))

    def to_bytes(self) -> bytes:
        """The content of a ``tokenizer.json`` that does what this tokenizer does, with `settings` beside it."""
        return str(self._backend.to_str(pretty=True)).encode()

    def settings(self) -> dict[str, Any] | None:
        """The keys of the ``tokenizer_config.json`` beside `to_bytes`; None if no file named the tokens."""
        return self._told.config() if self._told.stated else None


#: what `tidied` replaces, in order
UNTIDY = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
          (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))  # fmt: skip


def tidied(text: str) -> str:
    """``text`` as transformers' ``clean_up_tokenization`` leaves it."""
    for blank, none in UNTIDY:
        text = text.replace(blank, none)
    return text


def merges_beside(vocabulary: Path) -> Path | None:
    """The file X-merges.txt beside X-vocab.json; None if there is none, or the file has another name."""
    merges = vocabulary.with_name(vocabulary.name.removesuffix(reading.VOCABULARY) + reading.MERGES)
    return merges if vocabulary.name.endswith(reading.VOCABULARY) and merges.is_file() else None


@contextlib.contextmanager
def _told(said: str = "the tokenizer cannot encode the text") -> Iterator[None]:
    """Raise ValueError where the library panics or raises a bare Exception, as for a word that has no token."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{said}: {error}") from error


@contextlib.contextmanager
def _as_value_error(said: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{said}: {error}") from error


def _byte_level(model: models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _existing(path: str | os.PathLike[str]) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{os.fspath(path)}: no such file")
    return Path(path)
