"""The cause of drift, told from texts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.traces.drift_causes import CAUSE_FIXES, CAUSE_MEANINGS, canonical_json, explain_drift

CONTEXT = '<|im_start|>system\n{"a": 1}<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n'
ARGUMENTS = '{"command":"caf\\u00e9 \\/", "all" : false,\n "n": 1e3}'
ANSWER = (
    "<think>\nI look. \n</think>\n\nWell.\n"
    f'<tool_call>\n{{"name": "bash", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>'
)
AFTER = "\n<|im_start|>user\nran<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\nI look. \n</think>\n\n"
REWRITTEN = '{"all": false, "command": "café /", "n": 1000.0}'


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (ANSWER, ("retokenised",)),
        (ANSWER.replace("Well.\n", "Well."), ("whitespace",)),
        (ANSWER.replace("look. \n<", "look.\n<"), ("whitespace",)),
        (ANSWER.replace(ARGUMENTS, REWRITTEN), ("arguments_reserialised",)),
        (ANSWER.replace("false", "False"), ("arguments_reserialised",)),
        (ANSWER.replace(THOUGHT, ""), ("reasoning_dropped",)),
        (ANSWER.replace(THOUGHT, "<think>\n\n</think>\n\n"), ("reasoning_dropped",)),
        (ANSWER.replace(THOUGHT, "").replace(ARGUMENTS, REWRITTEN), ("arguments_reserialised", "reasoning_dropped")),
        (ANSWER.replace("Well", "Good"), ("answer_changed",)),
        (ANSWER.replace(ARGUMENTS, ARGUMENTS.replace("1e3", "1001")), ("answer_changed",)),
        (ANSWER.replace("bash", "sh"), ("answer_changed",)),
    ],
)
def test_what_became_of_an_answer(answer: str, wanted: tuple[str, ...]) -> None:
    assert explain_drift(CONTEXT, ANSWER, CONTEXT + answer + AFTER) == wanted


def test_what_became_of_the_context() -> None:
    assert explain_drift(CONTEXT, ANSWER, CONTEXT.replace("Go", "Stop") + ANSWER + AFTER) == ("context_changed",)
    assert explain_drift(CONTEXT, ANSWER, CONTEXT + ANSWER.replace("W", "w"), tools="changed") == ("tools_changed",)
    other = CONTEXT.replace('{"a": 1}', '{"b": 1}')
    assert explain_drift(CONTEXT, ANSWER, other + ANSWER, tools="rewritten") == ("tools_rewritten",)
    older = CONTEXT.replace("Go.", "Go.<|im_end|>\n<|im_start|>assistant\n<think>\nold\n</think>\n\nYes.")
    assert explain_drift(older, ANSWER, older.replace("<think>\nold\n</think>\n\n", "") + ANSWER) == (
        "reasoning_dropped",
    )


def test_reasoning_without_tags_is_known_by_its_text() -> None:
    said = "[thought] I look for it. [/thought]"
    found = CONTEXT + "[thought]  [/thought]Yes.<|im_end|>"
    assert explain_drift(CONTEXT, said + "Yes.<|im_end|>", found, reasoning=["I look for it."]) == (
        "reasoning_dropped",
    )
    assert explain_drift(CONTEXT, said + "Yes.<|im_end|>", found) == ("answer_changed",)


def test_a_prompt_that_is_too_short_is_a_changed_answer() -> None:
    assert explain_drift(CONTEXT, ANSWER, CONTEXT + ANSWER[: len(ANSWER) // 2]) == ("answer_changed",)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**50), 2**50)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.booleans(), st.sampled_from([None, 1, 3]))
def test_json_is_one_text_however_it_is_written(value: dict[str, object], plain: bool, indent: int | None) -> None:
    one = json.dumps(value, ensure_ascii=plain, indent=indent)
    other = json.dumps(dict(reversed(value.items())), separators=(",", ":"))
    assert canonical_json(f"a {one} b") == canonical_json(f"a {other} b")


def test_braces_that_are_no_json_stay() -> None:
    assert canonical_json('if (x) { y } {"b": 1, "a": {}} {') == 'if (x) { y } {"a":{},"b":1} {'


def test_every_cause_says_what_it_means_and_what_helps() -> None:
    assert set(CAUSE_MEANINGS) == set(CAUSE_FIXES)
