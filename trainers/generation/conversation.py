"""A conversation: lines of text from rank 0's standard input, each continued by the model with all that was before."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import TextIO

from commengine import Communicator, UsageError
from commengine.rank_zero import on_rank_zero

#: lines that are commands and no text, as every line is that begins with "/"
FORGET, QUIT = "/new", "/quit"
HELP = f"Each line is continued by the model. {FORGET} forgets what was said; {QUIT} or the end of the input ends."

#: the exit status of a program that Ctrl-C ends
INTERRUPTED = 128 + signal.SIGINT
#: seconds by which Ctrl-C may reach the ranks one after the other
SIGNAL_SECONDS = 0.5


class Lines:
    """The lines of rank 0's standard input, on every rank of ``world``.

    world: a communicator without a timeout, because people take their time.
    """

    def __init__(self, world: Communicator, source: TextIO | None = None) -> None:
        self._world = world
        self._source = sys.stdin if source is None else source
        #: whether the last line is missing because Ctrl-C came while rank 0 waited for it; the same on all ranks
        self.interrupted = False

    def next(self) -> str | None:
        """The next line, without its end; None after the last, and if Ctrl-C came (`interrupted`). Collective.

        While rank 0 waits for a line, the other ranks sleep. Raises UsageError, on all ranks, if the line is no text.
        """
        line: str | None
        line, self.interrupted = on_rank_zero(self._world, self._line_or_interrupt)
        return line

    def _line_or_interrupt(self) -> tuple[str | None, bool]:
        try:
            line = self._read()
            (line or "").encode()  # bytes that are no text may have become halves of surrogate pairs
            return line, False
        except EOFError:
            return None, False
        except KeyboardInterrupt:
            print(file=sys.stderr, flush=True)  # the terminal has written ^C behind the prompt
            return None, True
        except UnicodeError as error:
            raise UsageError("standard input: not UTF-8 text") from error
        except (ValueError, OSError) as error:
            raise UsageError(f"standard input: {error}") from error

    def _read(self) -> str | None:
        asked = self._source is sys.stdin and sys.stdin.isatty()
        if asked and sys.stdout.isatty():
            return input("> ")  # with the editing of lines that readline offers
        if asked:
            print("> ", end="", file=sys.stderr, flush=True)  # standard output has the texts alone
        line = self._source.readline()
        return line.rstrip("\r\n") if line else None


class History:
    """The text of a conversation, of which the model sees the last tokens.

    encode: text to tokens. The whole text is encoded, because the tokens of its parts are not those of the whole.
    positions: of the model. room: the tokens that the next text may get.
    """

    def __init__(self, encode: Callable[[str], list[int]], positions: int, room: int) -> None:
        self._encode = encode
        # At least half of the positions are for what was said, whatever the text may get.
        self._longest = max(positions - room, positions // 2, 1)
        self._text = ""
        self.tokens: list[int] = []
        self.forgotten = 0

    def say(self, line: str) -> None:
        """Add a line of the user, after a new line if there is something before it."""
        self.answer(("\n" if self._text else "") + line)

    def answer(self, text: str) -> None:
        """Add a text of the model, as it was shown."""
        self._text += text
        whole = self._encode(self._text)
        self.tokens = whole[-self._longest :]
        self.forgotten = len(whole) - len(self.tokens)

    def clear(self) -> None:
        """Forget everything."""
        self._text, self.tokens, self.forgotten = "", [], 0


def converse(world: Communicator, lines: Lines, history: History, answer: Callable[[list[int], int], str]) -> int:
    """Read lines until the last one. ``answer(tokens, turn)`` shows the model's text and returns it.

    Returns the exit status: 0, or INTERRUPTED if Ctrl-C came while rank 0 waited for a line.

    Collective over ``world``, as are the calls of ``answer``; the remarks of rank 0 go to standard error. Called in the
    main thread, because the ranks but 0 ignore SIGINT meanwhile.
    """

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, file=sys.stderr, flush=True)

    # A launcher hands Ctrl-C to all ranks, and it is rank 0's alone.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if world.rank else None
    try:
        say(HELP)
        turn = told = 0
        while (line := lines.next()) is not None:
            if line.startswith("/"):
                command = line.strip()
                if command == QUIT:
                    break
                if command == FORGET:
                    history.clear()
                    told = 0
                else:
                    hint = "a text that begins with / needs a blank before it"
                    say(f"error: {command.split()[0]:.40}: no such command; valid: {FORGET}, {QUIT} ({hint})")
                continue
            if line.strip():
                history.say(line)
            if not history.tokens:
                continue  # after an empty line the model goes on, if there is something to go on from
            if history.forgotten > told:
                say(f"(the first {history.forgotten} tokens of the conversation are forgotten)")
                told = history.forgotten
            history.answer(answer(history.tokens, turn))
            turn += 1
        # The others have heard of rank 0's Ctrl-C, and their own may come a moment later.
        if lines.interrupted and world.rank:
            time.sleep(SIGNAL_SECONDS)
    finally:
        if world.rank:
            signal.signal(signal.SIGINT, before)
    return INTERRUPTED if lines.interrupted else 0
