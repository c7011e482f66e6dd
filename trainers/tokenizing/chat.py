"""A chat as one text, by the template that stands beside a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .reading import Told


def render(told: Told, messages: Sequence[Mapping[str, Any]], *, answer: bool, **values: Any) -> str:
    """The text of ``messages``, as ``apply_chat_template`` of transformers gives it without tokenizing.

    told: the template, and the named tokens, which it may ask for. answer, values, errors: see `Tokenizer.chat`. A
    template is a program of others: it runs in Jinja's sandbox, which reaches no file and changes no value.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the model's own words for training; here it is its content."""

        tags = {"generation"}  # noqa: RUF012 - Jinja looks for it on the class and on the object

        def parse(self, parser: Any) -> Any:
            parser.stream.expect("name:generation")
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body)

    def refuse(why: str) -> None:
        raise TemplateError(why)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
                sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    template = told.template
    if isinstance(template, Mapping):
        wanted = "tool_use" if values.get("tools") and "tool_use" in template else "default"
        if wanted not in template:
            raise ValueError(f"chat_template: none is named default; there are {', '.join(template)}")
        template = template[wanted]
    if template is None:
        raise ValueError("the tokenizer has no chat_template")
    place = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )  # fmt: skip
    place.filters["tojson"] = to_json
    place.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    known = {"tools": None, "documents": None} | dict(told.names) | values
    try:
        return place.from_string(template).render(messages=list(messages), add_generation_prompt=answer, **known)
    except TemplateError as error:
        raise ValueError(f"chat_template: {str(error)[:200]}") from error
