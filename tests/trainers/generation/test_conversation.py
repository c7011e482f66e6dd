"""A conversation: every rank gets rank 0's lines, and the model sees what was said, or its end."""

import io

import pytest

from commengine import UsageError
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


@pytest.mark.mpi
@pytest.mark.parametrize(
    "said",
    ["hello\nyou\n/new\n\n  \nagain\n\n", "hello\r\nyou\r\n/new\r\n\r\nagain\r\n\r\n/quit\r\nnot read\n"],
)
def test_every_rank_gets_the_lines(world, capfd, said):
    source = io.StringIO(said, newline="") if world.rank == 0 else io.StringIO("another rank has no input")
    asked = []

    def answer(tokens, turn):
        asked.append((turn, bytes(tokens).decode()))
        return f"<{turn}>"

    converse(world, Lines(world, source), history(positions=100), answer)
    assert asked == [(0, "hello"), (1, "hello<0>\nyou"), (2, "again"), (3, "again<2>")]
    out, err = capfd.readouterr()
    assert out == "" and ("/quit" in err) == (world.rank == 0)


@pytest.mark.mpi
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter is Python's where the locale is C
def test_input_that_is_no_text_is_an_error_on_all_ranks(world, errors):
    raw = io.BytesIO(b"one\n" + b"x" * 100_000 + b"\xff\xfe\n")
    lines = Lines(world, io.TextIOWrapper(raw, encoding="utf-8", errors=errors))
    assert lines.next() == "one"
    with pytest.raises(UsageError, match="standard input: not UTF-8 text"):
        lines.next()
