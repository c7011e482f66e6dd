"""Words, as the published perplexities count them, and WikiText's text as it was before it was split into words."""

from __future__ import annotations

import math
import re

#: in order, from Megatron-LM's `wikitext_detokenizer` (tasks/zeroshot_gpt/detokenizer.py), a pattern and its
#: replacement. lm-evaluation-harness has the same function. Neither can be inverted.
_WIKITEXT = [
    (re.escape("s '"), "s'"), (r"/' [0-9]/", r"/'[0-9]/"),
    (" @-@ ", "-"), (" @,@ ", ","), (re.escape(" @.@ "), "."),
    (" : ", ": "), (" ; ", "; "), (re.escape(" . "), ". "), (" ! ", "! "), (re.escape(" ? "), "? "), (" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"),
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"), (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "), (" 's", "'s"),
]  # fmt: skip


def detokenized_wikitext(text: str) -> str:
    """WikiText's text with punctuation where a writer puts it."""
    for pattern, replacement in _WIKITEXT:
        text = re.sub(pattern, replacement, text)
    return text


def paper_words(text: str) -> int:
    """The words of a text as Megatron-LM counts them (the paper's T_o, equation 4): what single spaces separate."""
    return len(text.strip().split(" "))


def harness_words(text: str) -> int:
    """The words of a document as lm-evaluation-harness counts them: what white space separates."""
    return len(re.split(r"\s+", text))


def wikitext_documents(text: str) -> list[str]:
    """WikiText's articles, as the data set of lm-evaluation-harness has them: a line "= Title =" begins one."""
    found: list[str] = []
    lines: list[str] = []
    for line in text.split("\n"):
        short = line.replace("= = =", "===").replace("= =", "==").strip()
        if short.startswith("= ") and short.endswith(" ="):
            found.append("\n".join(lines))
            lines = []
        lines.append(line)
    return [one for one in (*found, "\n".join(lines)) if one.strip()]


def perplexity(nll: float, items: int) -> float:
    """exp(nll / items); infinity where a float has no room for it, NaN for no items."""
    if not items:
        return math.nan
    try:
        return math.exp(nll / items)
    except OverflowError:
        return math.inf
