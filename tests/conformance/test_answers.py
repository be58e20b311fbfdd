"""Restyling an answer changes neither its values nor its text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.conformance.awkward_answers import STYLES, qwen_text, split_randomly, to_json
from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.types import ToolCall

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
@given(value=VALUES)
def test_every_style_parses_to_the_same_value(style: Any, value: Any) -> None:
    assert json.loads(to_json(value, style)) == value


def test_styles_differ_from_each_other_and_from_json_dumps() -> None:
    value = {"command": "a/é", "n": 2000, "flags": [True, None], "empty": {}}
    texts = {name: to_json(value, style) for name, style in STYLES.items()}
    assert texts["plain"] == json.dumps(value, ensure_ascii=False)
    assert len(set(texts.values())) == len(STYLES)
    assert texts["escaped"] == '{"command":"a\\/\\u00e9","n":2000,"flags":[true,null],"empty":{}}'
    assert texts["numbers"] == '{"empty":{} , "flags":[true , null] , "n":2e3 , "command":"a/é"}'.replace('":', '": ')


@given(st.text(alphabet='ab é\n{}"<>/thinkol_c', max_size=80), st.integers(0, 10))
def test_pieces_join_to_the_text_and_are_repeatable(text: str, every: int) -> None:
    assert "".join(split_randomly(text, every=every)) == text
    assert split_randomly(text, every=every) == split_randomly(text, every=every)


def test_tags_are_not_cut() -> None:
    text = "<think>\n" + "word " * 200 + "</think><tool_call>{}</tool_call>"
    pieces = split_randomly(text, every=10)
    assert len(pieces) > 50
    assert {"<think>", "</think>", "<tool_call>", "</tool_call>"} <= set(pieces)
    assert split_randomly(text, every=0)[1] == "\n" + "word " * 200


def test_qwen_text_has_reasoning_text_and_calls() -> None:
    calls = (ToolCall("1", "bash", '{ "a" :1}'), ToolCall("2", "x", "{}"))
    assert qwen_text(ScriptedReply("Well.", "Hm.", calls)) == (
        '<think>\nHm.\n</think>\n\nWell.\n<tool_call>\n{"name": "bash", "arguments": { "a" :1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>'
    )
    assert qwen_text(ScriptedReply("Yes.")) == "<think>\n\n</think>\n\nYes."
