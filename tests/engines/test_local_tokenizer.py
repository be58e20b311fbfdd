"""Rendering, streamed decoding and stop strings of the local engine."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polar_proxy.engines.chat_template import flat_text, template_message
from polar_proxy.engines.local.tokenizer import ChatTokenizer, TextStream, TokenDecoder
from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, Message, ToolCall

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(random_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(random_model_dir)


@given(data=st.data())
def test_decodes_like_the_tokenizer(tokenizer: Any, data: st.DataObject) -> None:
    chat = ChatTokenizer(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    stream = chat.stream(())
    text = "".join([*(stream.feed(token) for token in ids), stream.close()])
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert chat.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_character_of_several_tokens_comes_whole(tokenizer: Any) -> None:
    ids = tokenizer.encode("a🦊b", add_special_tokens=False)
    stream = ChatTokenizer(tokenizer).stream(())
    pieces = [stream.feed(token) for token in ids]
    assert "".join(pieces) == "a🦊b"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 3


def test_decodes_a_tokenizer_that_is_not_byte_level() -> None:
    tokens = ["▁Hello", "▁wor", "ld", "▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>", "!"]
    backend = Tokenizer(models.BPE({word: place for place, word in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    chat = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    stream = chat.stream(())
    pieces = [stream.feed(token) for token in range(len(tokens))]
    assert pieces[:3] == ["Hello", " wor", "ld"]
    assert "".join(pieces) + stream.close() == "Hello world 🦊!"
    unfinished = chat.stream(())
    assert [unfinished.feed(token) for token in (0, 4, 5)] == ["Hello", "", ""]
    assert unfinished.close().startswith("\ufffd")


class Letters(TokenDecoder):
    """A decoder whose tokens are characters."""

    def __init__(self) -> None:
        super().__init__(lambda ids: "", set())

    def feed(self, token_id: int) -> str:
        return chr(token_id)

    def close(self) -> str:
        return ""


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_string_cuts_at_its_first_occurrence(text: str, stop: list[str]) -> None:
    stream, output, used = TextStream(Letters(), stop), "", 0
    for char in text:
        output += stream.feed(ord(char))
        used += 1
        if stream.stopped_at is not None:
            break
    output += stream.close()
    ends = [place + len(mark) for mark in stop if (place := text.find(mark)) >= 0]
    assert (stream.stopped_at is not None) == bool(ends)
    if not ends:
        assert output == text
        return
    assert used == min(ends), "it stops with the token that completes the first stop string"
    assert output == text[: min(text[:used].find(mark) for mark in stop if mark in text[:used])]


def test_holds_only_possible_beginnings_of_stop_strings() -> None:
    stream = TextStream(Letters(), ["xyz"])
    assert [stream.feed(ord(char)) for char in "axyaxyz"] == ["a", "", "", "xya", "", "", ""]
    assert stream.stopped_at is not None


def test_template_message_and_flat_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert flat_text(parts) == "a\nb"
    assert flat_text(None) == ""
    calls = (ToolCall("1", "f", '{"b": 1, "a": 2}'), ToolCall("2", "g", ""), ToolCall("3", "h", "not JSON"))
    made = template_message(Message("assistant", None, "because", calls))
    assert [call["function"]["arguments"] for call in made["tool_calls"]] == [{"b": 1, "a": 2}, {}, "not JSON"]
    assert list(made["tool_calls"][0]["function"]["arguments"]) == ["b", "a"], "the order stays"
    assert (made["content"], made["reasoning_content"], made["reasoning"]) == ("", "because", "because")
    with pytest.raises(RequestError, match="image_url"):
        flat_text([{"type": "image_url", "image_url": {"url": "x"}}])


def test_a_developer_message_is_a_system_message_where_the_template_has_no_developer_role(tokenizer: Any) -> None:
    chat, user = ChatTokenizer(tokenizer), Message("user", "Hello")
    prompts = [chat.render(ChatRequest("", (Message(role, "Be exact."), user))) for role in ("system", "developer")]
    assert prompts[0] == prompts[1]
    other = copy.copy(tokenizer)
    other.chat_template = "{% for one in messages if one.role == 'developer' %}{{ one.content }}{% endfor %}"
    assert ChatTokenizer(other).render(ChatRequest("", (Message("developer", "Be exact."), user))) == "Be exact."


def test_template_refusal_is_a_bad_request(tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="Unexpected role clown") as caught:
        ChatTokenizer(tokenizer).render(ChatRequest("", (Message("system", "s"), Message("clown", "x"))))
    assert caught.value.status == 400


def test_reasoning_mode_follows_the_prompt(tokenizer: Any) -> None:
    template = ChatTokenizer(tokenizer)
    request = ChatRequest("", (Message("user", "x"),))
    assert template.reasoning(template.render(request)) == "tags"
    opened = ChatRequest("", (Message("user", "x"),), template_kwargs={"open_thinking": True})
    assert template.reasoning(template.render(opened)) == "open"


def test_template_shows_tools_unless_forbidden(tokenizer: Any) -> None:
    tools = ({"type": "function", "function": {"name": "get_weather"}},)
    for choice, shown in itertools.product((None, "auto", "none"), (tools, ())):
        request = ChatRequest("", (Message("user", "x"),), tools=shown, tool_choice=choice)
        text = ChatTokenizer(tokenizer).render(request)
        assert ("get_weather" in text) == (bool(shown) and choice != "none")
