"""Windows: each target is scored once, from as many tokens before it as the definition says."""

import numpy as np
import pytest

from trainers.scoring.passages import Windows


def expected(tokens, length, stride):
    """By the definition, one target after the other: (window, tokens read before the target, target)."""
    found = []
    for target in range(1, len(tokens)):
        k = 0
        while target > k * stride + length:  # the first window that reaches it
            k += 1
        found.append((k, list(tokens[k * stride : target]), tokens[target]))
    return found


@pytest.mark.parametrize("stride", [1, 3, 4, 16])
@pytest.mark.parametrize("count", [2, 10, 16, 17, 18, 32, 33, 34, 101])
def test_every_target_is_scored_once_from_the_tokens_of_its_window(count, stride):
    tokens = np.arange(100, 100 + count)
    windows = Windows([tokens], 16, stride)
    found = []
    for k, one in enumerate(windows):
        assert 2 <= len(one.tokens) <= 17 and 1 <= one.scored < len(one.tokens)
        first = len(one.tokens) - one.scored
        found += [(k, list(one.tokens[:place]), one.tokens[place]) for place in range(first, len(one.tokens))]
    assert found == expected(tokens, 16, stride)
    assert windows.targets == count - 1
    if count - 1 >= 16:  # the count of windows, as Megatron-LM has it
        assert len(windows) == -(-(count - 1 - 16) // stride) + 1
        assert windows[0].scored == 16 and all(one.scored == stride for one in list(windows)[1:-1])


def test_no_window_crosses_the_end_of_a_text():
    texts = [np.arange(10, 15), np.arange(20, 21), np.arange(0), np.arange(30, 70), np.arange(80, 82)]
    windows = Windows(texts, 16, 8)
    assert windows.targets == 4 + 39 + 1 and sum(one.scored for one in windows) == 44
    alone = [one for text in texts for one in Windows([text], 16, 8)]
    assert [(one.tokens.tolist(), one.scored) for one in windows] == [(o.tokens.tolist(), o.scored) for o in alone]
    with pytest.raises(IndexError):
        windows[len(windows)]
    assert len(Windows([np.arange(1)], 4, 4)) == 0
