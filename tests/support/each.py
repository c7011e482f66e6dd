"""Many quick cases in one test: pytest spends more on a test of its own than these take."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(argument: str, cases: Iterable[Any], name: Callable[[Any], str] = str) -> Callable[..., Any]:
    """Call a test with each of ``cases`` as ``argument``, and say in which one it failed; it may take fixtures, too."""

    def of(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def test_each(**fixtures: Any) -> None:
            for case in cases:
                try:
                    test(**{argument: case}, **fixtures)
                except BaseException as error:  # also pytest's own, and SystemExit
                    error.add_note(f"{argument}: {name(case)}")
                    raise

        taken = inspect.signature(test).parameters.values()
        test_each.__signature__ = inspect.Signature([one for one in taken if one.name != argument])  # type: ignore[attr-defined]
        del test_each.__wrapped__  # type: ignore[attr-defined]
        return test_each

    return of
