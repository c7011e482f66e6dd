"""A chat as text. Texts of drawn templates are compared with transformers in test_reading."""

import pytest

from trainers.tokenizing.chat import render
from trainers.tokenizing.reading import Told

CHAT = [{"role": "user", "content": "hi"}]


def test_a_template_sees_the_named_tokens_and_what_is_asked_for():
    told = Told(
        {"bos_token": "<s>"}, template="{{ bos_token }}{{ messages[0].content }}{{ date }}{{ add_generation_prompt }}"
    )
    assert render(told, CHAT, answer=True, date="today") == "<s>hitodayTrue"


def test_several_templates_have_names():
    told = Told({}, template={"default": "a", "tool_use": "b"})
    assert render(told, CHAT, answer=True) == "a" and render(told, CHAT, answer=True, tools=[{}]) == "b"
    with pytest.raises(ValueError, match="none is named default; there are rag"):
        render(Told({}, template={"rag": "c"}), CHAT, answer=True)


@pytest.mark.parametrize(
    "template,words",
    [
        (None, "the tokenizer has no chat_template"),
        ("{{ raise_exception('no system') }}", "chat_template: no system"),
        ("{% if %}", "chat_template: Expected"),
        ("{{ ''.__class__.__mro__ }}", "chat_template: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "chat_template: "),
    ],
)
def test_what_a_template_cannot_do_is_one_error(template, words):
    with pytest.raises(ValueError, match=words):
        render(Told({}, template=template), CHAT, answer=True)
