"""The Hermes parser does not depend on chunks, loses no character, and keeps arguments as they were sampled."""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK, HermesParser, Reasoning, parse_call
from polar_proxy.types import SampleEvent, ToolDelta

pytestmark = pytest.mark.slow

GOOD = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@dataclass(frozen=True)
class ParsedText:
    """The parsed events of an answer, joined."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()


def parse(chunks: Iterable[str], *, tools: bool = True, reasoning: Reasoning = "off") -> ParsedText:
    numbers = itertools.count()
    parser = HermesParser(tools=tools, reasoning=reasoning, make_id=lambda: f"call_{next(numbers)}")
    parts = [*(parser.parse(SampleEvent(text=chunk)) for chunk in chunks), parser.parse(SampleEvent(finish_reason="x"))]
    return ParsedText(
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.tool_calls),
    )


def calls(parsed: ParsedText) -> list[tuple[str | None, str]]:
    return [(call.name, call.arguments) for call in parsed.tool_calls]


# Results of vLLM's hermes parser for the same texts, recorded from a real server, where both agree.


def test_parses_a_call_like_vllm() -> None:
    parsed = parse([GOOD])
    assert (parsed.text, calls(parsed)) == ("", [("get_weather", '{"city": "Paris"}')])


def test_parses_text_and_a_call_like_vllm() -> None:
    parsed = parse(["I will look. " + GOOD])
    assert (parsed.text, calls(parsed)) == ("I will look. ", [("get_weather", '{"city": "Paris"}')])


def test_malformed_call_stays_text_like_in_vllm() -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>'
    parsed = parse([text])
    assert (parsed.text, parsed.tool_calls) == (text, ())


def test_call_cut_by_max_tokens_stays_text() -> None:
    text = 'Look: <tool_call>\n{"name": "get_weather", "arguments": {"ci'
    assert parse([text]) == ParsedText(text)


def test_accepts_a_whole_call_without_end_tag() -> None:
    assert calls(parse([GOOD.removesuffix("</tool_call>")])) == [("get_weather", '{"city": "Paris"}')]


def test_without_tools_everything_is_text() -> None:
    assert parse([GOOD], tools=False) == ParsedText(GOOD)


def test_drops_white_space_between_calls() -> None:
    parsed = parse(["\n\n", GOOD, "\n", GOOD.replace("Paris", "Rome"), "\n"])
    assert parsed.text == ""
    assert calls(parsed) == [("get_weather", '{"city": "Paris"}'), ("get_weather", '{"city": "Rome"}')]
    assert [(call.index, call.id) for call in parsed.tool_calls] == [(0, "call_0"), (1, "call_1")]


def test_keeps_text_after_a_call() -> None:
    parsed = parse([GOOD, "\nDone."])
    assert (parsed.text, len(parsed.tool_calls)) == ("\nDone.", 1)


def test_end_tag_inside_a_json_string_does_not_end_the_call() -> None:
    arguments = '{"text": "say \\"</tool_call>\\" twice"}'
    parsed = parse([f'<tool_call>{{"name": "say", "arguments": {arguments}}}</tool_call>'])
    assert calls(parsed) == [("say", arguments)]


def test_unclosed_string_does_not_swallow_the_next_call() -> None:
    broken = '<tool_call>{"name": "a, "arguments": {}}</tool_call>'
    parsed = parse([broken, "\n", GOOD])
    assert parsed.text == broken + "\n"
    assert calls(parsed) == [("get_weather", '{"city": "Paris"}')]


@pytest.mark.parametrize(
    "body",
    ['{"name": "a"}', '{"arguments": {}}', '{"name": 1, "arguments": {}}', "[]", "", '{"name": "", "arguments": {}}',
     '{"name": "a", "arguments": {}} x', "{'name': 'a', 'arguments': {}}"],
)  # fmt: skip
def test_parse_call_rejects_malformed_calls(body: str) -> None:
    assert parse_call(body) is None
    assert parse([CALL + body + END_CALL]) == ParsedText(CALL + body + END_CALL)


def test_arguments_keep_their_exact_text() -> None:
    arguments = '{ "b":1.0,"a" : [1,  2e3], "s":"\\u00fc\\/" }'
    body = f'{{"arguments": {arguments} , "name":"f", "arguments_too": {{"arguments": 1}}}}'
    assert parse_call(body) == ("f", arguments)


def test_deep_nesting_stays_text() -> None:
    text = CALL + '{"name": "f", "arguments": ' + "[" * 200_000 + END_CALL
    assert parse([text]) == ParsedText(text)


def test_reasoning_in_tags() -> None:
    parsed = parse(["<think>\nhm <tool_call>\n</think>\n\n", GOOD], reasoning="tags")
    assert (parsed.text, parsed.reasoning, len(parsed.tool_calls)) == ("", "\nhm <tool_call>\n", 1)


def test_reasoning_opened_by_the_prompt() -> None:
    assert parse(["so</think>\n\nYes"], reasoning="open") == ParsedText("\n\nYes", "so")
    assert parse(["never ", "closed </thi"], reasoning="open") == ParsedText("", "never closed </thi")


def test_think_tag_inside_the_answer_is_text() -> None:
    assert parse(["Use <think> and </think>."], reasoning="tags") == ParsedText("Use <think> and </think>.")
    assert parse(["<think>a</think>"], reasoning="off") == ParsedText("<think>a</think>")


def test_text_is_returned_as_soon_as_it_is_certain() -> None:
    parser = HermesParser(tools=True)
    parts = [parser.parse(SampleEvent(text=text)).text for text in ("Hello <b", " <tool_", "box>")]
    assert parts == ["Hello <b", " ", "<tool_box>"]


def test_whole_answer_in_one_event_is_parsed_like_its_pieces() -> None:
    event = SampleEvent(text=GOOD[:-3], token_ids=(1, 2), logprobs=(-1.0, -2.0), finish_reason="stop")
    parsed = HermesParser(tools=True, make_id=lambda: "call_0").parse(event)
    assert (parsed.text, parsed.finish_reason, parsed.token_ids) == (GOOD[:-3], "stop", (1, 2))


FRAGMENTS = st.lists(
    st.sampled_from(
        [THINK, END_THINK, CALL, END_CALL, GOOD, "<", "</", "tool_call>", "think>", " ", "\n", '"', "\\", "{", "}",
         '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": "', "word", "ü🙂"]
    ),
    max_size=14,
).map("".join)  # fmt: skip
REASONING = st.sampled_from(["off", "tags", "open"])


@given(FRAGMENTS, REASONING, st.booleans(), st.data())
def test_result_does_not_depend_on_chunks(text: str, reasoning: Reasoning, tools: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = parse([text], tools=tools, reasoning=reasoning)
    assert parse(chunks, tools=tools, reasoning=reasoning) == whole
    assert parse(list(text), tools=tools, reasoning=reasoning) == whole


@given(FRAGMENTS, REASONING, st.booleans())
def test_no_character_is_lost(text: str, reasoning: Reasoning, tools: bool) -> None:
    parsed = parse([text], tools=tools, reasoning=reasoning)
    if reasoning == "off" and not parsed.tool_calls:
        assert parsed.text == text
    output = parsed.text + parsed.reasoning + "".join(f"{name}{arguments}" for name, arguments in calls(parsed))
    for word in ("word", "ü🙂", "Paris"):
        assert output.count(word) == text.count(word)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(END_CALL),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), min_size=1
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_finds_every_well_formed_call(made: list[tuple[str, object]], indent: int | None, ascii_only: bool) -> None:
    printed = [(name, json.dumps(value, indent=indent, ensure_ascii=ascii_only)) for name, value in made]
    text = "\n".join(
        f'{CALL}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{END_CALL}' for name, arguments in printed
    )
    parsed = parse(list(text))
    assert parsed.text == ""
    assert calls(parsed) == printed


@pytest.mark.parametrize("mode", ["implied", "implied_call"])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_implied_reasoning_needs_no_tag(mode: Reasoning, size: int) -> None:
    def read(text: str) -> tuple[str, str, int]:
        parsed = parse([text[at : at + size] for at in range(0, len(text), size)], reasoning=mode)
        return parsed.reasoning, parsed.text, len(parsed.tool_calls)

    assert read("hm</think>Yes.") == read("<think>hm</think>Yes.") == ("hm", "Yes.", 0)
    assert read("never ended <tool") == ("never ended <tool", "", 0)
    ends = mode == "implied_call"
    assert read("hm" + GOOD) == (("hm", "", 1) if ends else ("hm" + GOOD, "", 0))


def test_a_parser_is_freed_with_its_last_reference() -> None:
    """Each call has a parser: reference cycles would wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        parser = HermesParser(tools=True, reasoning="tags")
        parser.parse(SampleEvent(text=f"{THINK}why{END_THINK}I look.", finish_reason="stop"))
        freed = weakref.ref(parser)
        del parser
        assert freed() is None
    finally:
        gc.enable()
