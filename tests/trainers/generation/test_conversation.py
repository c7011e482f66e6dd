"""A conversation: every rank gets rank 0's lines, and the model sees what was said, or its end."""

import io
import signal

import pytest

from commengine import UsageError
from tests.support.tokenizers.sentencepiece import sentencepiece
from trainers.data.tokenizer import Tokenizer
from trainers.generation.conversation import History, Lines, converse


def history(positions=20, room=8):
    return History(lambda text: list(text.encode()), positions, room)


def test_the_end_of_what_was_said_is_kept():
    found = history()
    found.say("abc")
    found.answer("de")
    found.say("f")
    assert bytes(found.tokens) == b"abcde\nf" and found.forgotten == 0
    found.say("0123456789")
    assert bytes(found.tokens) == b"f\n0123456789"[-12:] and found.forgotten == len(b"abcde\nf\n0123456789") - 12
    found.clear()
    found.say("x" * 30)
    assert len(found.tokens) == 12 and found.forgotten == 18
    large = history(20, 1000)
    large.say("x" * 30)
    assert len(large.tokens) == 10  # half of the positions, whatever the text may get


def test_the_tokens_are_those_of_the_whole_conversation():
    """SentencePiece puts a blank before each text that it encodes, and a conversation is one text."""
    backend = Tokenizer(sentencepiece(["the dog said to the cat"] * 9, 60))
    found = History(backend.encode, 100, 8)
    found.say("the dog")
    found.answer(" said")
    found.say("to the cat")
    assert found.tokens == backend.encode("the dog said\nto the cat")


@pytest.mark.mpi
@pytest.mark.parametrize(
    "said",
    [
        "hello\nyou\n/new\n\n  \nagain\n\n",
        "hello\r\nyou\r\n/new\r\n\r\nagain\r\n\r\n/quit\r\nnot read\n",
        "hello\n/exit\nyou\n/new now\n/new\nagain\n/\n\n/quit \nnot read\n",
    ],
)
def test_every_rank_gets_the_lines(world, capfd, said):
    source = io.StringIO(said, newline="") if world.rank == 0 else io.StringIO("another rank has no input")
    asked = []

    def answer(tokens, turn):
        asked.append((turn, bytes(tokens).decode()))
        return f"<{turn}>"

    assert converse(world, Lines(world, source), history(positions=100), answer) == 0
    assert asked == [(0, "hello"), (1, "hello<0>\nyou"), (2, "again"), (3, "again<2>")]
    out, err = capfd.readouterr()
    assert out == "" and ("/quit" in err) == (world.rank == 0)
    refused = [line.split(";")[0] for line in err.splitlines() if line.startswith("error: ")]
    wrong = ["/exit", "/new", "/"] if "/exit" in said and world.rank == 0 else []
    assert refused == [f"error: {word}: no such command" for word in wrong]


@pytest.mark.mpi
def test_a_text_may_begin_with_a_slash_after_a_blank(world, capfd):
    asked = []
    converse(world, Lines(world, io.StringIO(" /usr is\n")), history(), lambda *given: asked.append(given) or "")
    assert asked == [(list(b" /usr is"), 0)] and "error" not in capfd.readouterr().err


class Interrupted(io.StringIO):
    """Standard input at which Ctrl-C comes instead of the second line."""

    lines = 0

    def readline(self, *size):
        self.lines += 1
        if self.lines == 2:
            signal.raise_signal(signal.SIGINT)
        return super().readline(*size)


@pytest.mark.slow
@pytest.mark.mpi
def test_an_interrupt_at_the_prompt_ends_all_ranks_in_order(world, capfd):
    """A launcher hands Ctrl-C to every rank. The others leave it to rank 0, which waits for a line."""
    asked = []

    def answer(tokens, turn):
        asked.append(turn)
        if world.rank:
            signal.raise_signal(signal.SIGINT)
        return ""

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert converse(world, Lines(world, Interrupted("a\nb\n")), history(), answer) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == [0]
    assert capfd.readouterr().err.splitlines()[1:] == ([""] if world.rank == 0 else [])


@pytest.mark.mpi
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter is Python's where the locale is C
def test_input_that_is_no_text_is_an_error_on_all_ranks(world, errors):
    raw = io.BytesIO(b"one\n" + b"x" * 100_000 + b"\xff\xfe\n")
    lines = Lines(world, io.TextIOWrapper(raw, encoding="utf-8", errors=errors))
    assert lines.next() == "one"
    with pytest.raises(UsageError, match="standard input: not UTF-8 text"):
        lines.next()
