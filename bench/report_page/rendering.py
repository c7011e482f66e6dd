"""HTML of markdown for a page that stands alone. Text is escaped, and long tables and long code are folded."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markupsafe import Markup

#: a longer table, or code of more lines, is folded
FOLDED_ROWS = 20


def markdown(text: str) -> Markup:
    """The HTML of markdown, whose HTML is shown as text. Headings are one level lower, because a page has its own."""
    return Markup(_MARKDOWN.render(str(text)))


def inline(text: str) -> Markup:
    """One line of markdown: code, bold text, and links."""
    return Markup(_MARKDOWN.renderInline(str(text)))


def _stand_alone(state: StateCore) -> None:
    """Show a link's address as text, because the page stands alone, and lower the headings."""
    for block in state.tokens:
        if block.type.startswith("heading"):
            block.tag = f"h{min(int(block.tag[1]) + 1, 6)}"
        address: object = ""
        for token in block.children or ():
            if token.type == "link_open":
                address, token.type = token.attrGet("href"), "text"
            elif token.type == "link_close":
                token.type, token.content = "text", f" ({address})"


def _fold(state: StateCore) -> None:
    """Let a click on the number of rows or lines show a long table or long code."""
    found: list[Token] = []
    begin = 0
    for token in state.tokens:
        if token.type in ("table_open", "fence", "code_block"):
            begin = len(found)
        found.append(token)
        rows = sum(one.type == "tr_open" for one in found[begin:]) - 1 if token.type == "table_close" else 0
        lines = token.content.count("\n") if token.type in ("fence", "code_block") else 0
        if max(rows, lines) > FOLDED_ROWS:
            summary = f"<details><summary>{rows or lines} {'rows' if rows else 'lines'}</summary>\n"
            found.insert(begin, Token("html_block", "", 0, content=summary))
            found.append(Token("html_block", "", 0, content="</details>\n"))
    state.tokens = found


_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
_MARKDOWN.normalizeLink = lambda url: url  # type: ignore[method-assign]
_MARKDOWN.core.ruler.push("stand_alone", _stand_alone)
_MARKDOWN.core.ruler.push("fold", _fold)
