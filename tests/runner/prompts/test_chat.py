"""A conversation is what its template writes; what a template cannot be given is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piecegraph.errors import ConfigError, RequestError
from piecegraph.runner.prompts.chat import ChatOptions, conversation_sequence, read_chat_template, tokenize_chat
from piecegraph.runner.prompts.tokenize import TokenizedPrompt
from tests.runner.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)


def written(messages: list[Any], **options: Any) -> str | None:
    return tokenize_chat(messages, TOKENIZER, ChatOptions(**options)).text


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def test_a_conversation_adds_no_special_tokens_of_its_own() -> None:
    """The template has written those it wants."""
    prompt = tokenize_chat([user("a")], TOKENIZER)
    assert prompt == TokenizedPrompt("<user>a<assistant>", TOKENIZER("<user>a<assistant>")["input_ids"])


def test_text_parts_are_rendered() -> None:
    """Joined for templates that write a text, given as they are to those that go over parts."""
    content = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    assert written([user(content)]) == "<user>a\nb\nc<assistant>"
    assert written([user(content)], chat_template=PARTS) == "[a][b][c]"
    assert written([user(content)], chat_template=BOTH) == "[a][b][c]"
    assert written([user(content)], chat_template=BOTH, chat_template_content_format="string") == "a\nb\nc"


def test_texts_become_parts_only_for_templates_that_need_parts() -> None:
    assert written([user("ab")], chat_template=PARTS) == "[ab]"
    assert written([user("ab")], chat_template=BOTH) == "ab"
    assert written([user("ab")], chat_template=BOTH, chat_template_content_format="openai") == "[ab]"


def test_the_last_message_is_continued() -> None:
    messages = [user("a"), {"role": "assistant", "content": "It is"}]
    found = written(messages, add_generation_prompt=False, continue_final_message=True)
    assert found == "<user>a<assistant>It is"
    with pytest.raises(RequestError, match="give add_generation_prompt=False"):
        ChatOptions(continue_final_message=True)


def test_tools_and_variables_reach_the_template() -> None:
    call = "messages[0].tool_calls[0].function"
    template = "{{ tools[0].function.name }} {{ mood }} {{ CALL.arguments.x }}{{ messages[0].content }}"
    template = template.replace("CALL", call)
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}]
    messages = [{"role": "assistant", "tool_calls": calls}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert written(messages, chat_template=template, tools=[tool], chat_template_kwargs={"mood": "good"}) == "f good 7"
    assert messages == [{"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video_url"])
def test_media_are_refused_by_name(kind: str) -> None:
    with pytest.raises(RequestError, match=f"message 1 has a part of type '{kind}'; this version takes text alone"):
        written([user("a"), user([{"type": "text", "text": "a"}, {"type": kind, kind: {"url": "x"}}])])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the conversation is empty"),
        ("hello", "a conversation is a list of messages, not 'hello'"),
        (["hello"], "message 0 is 'hello'; a message is a dictionary"),
        ([{"content": "a"}], "message 0 has role=None; it must be a string"),
        ([user(7)], "message 0 has content=7; it must be text or a list of parts"),
        ([user([7])], "message 0 has a part 7"),
        ([user([{"type": "text"}])], "its text must be a string"),
        ([user("a", tool_calls=[{"function": {"arguments": "{"}}])], "which is not JSON"),
    ],
)
def test_a_malformed_conversation_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        written(messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_content_format": "strings"}, "is unknown. Did you mean 'string'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has 'tokenize'"),
        ({"chat_template_kwargs": 7}, "chat_template_kwargs=7; it must be a dictionary"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatOptions(**options)


def test_an_unknown_template_name_is_refused() -> None:
    """A file's name would otherwise be the whole prompt."""
    with pytest.raises(
        RequestError, match=r"chat_template='t\.jinja' is not a Jinja template, and the tokenizer has none"
    ):
        written([user("a")], chat_template="t.jinja")


def test_one_conversation_and_several_are_accepted() -> None:
    assert conversation_sequence([user("a")]) == [[user("a")]]
    assert len(conversation_sequence([[user("a")], [user("b")]])) == 2
    with pytest.raises(RequestError, match="messages='a'; it must be a list"):
        conversation_sequence("a")  # type: ignore[arg-type]


def test_a_template_is_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    assert read_chat_template(file) == read_chat_template(str(file)) == "{{ messages[0].content }}"
    assert read_chat_template("{{ x }}") == "{{ x }}"
    assert read_chat_template(None) is None
    with pytest.raises(ConfigError, match="neither a Jinja template nor a file"):
        read_chat_template("nowhere.jinja")
    with pytest.raises(ConfigError, match="chat_template=5; it must be a Jinja template or the path"):
        read_chat_template(5)  # type: ignore[arg-type]
