"""Causes of drift, found from the texts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.traces.drift import CAUSE_FIXES, CAUSE_MEANINGS, canonical_json, explain_drift

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
    ("answer", "causes"),
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
def test_cause_of_a_changed_answer(answer: str, causes: tuple[str, ...]) -> None:
    assert explain_drift(CONTEXT, ANSWER, CONTEXT + answer + AFTER) == causes


def test_cause_of_a_changed_context() -> None:
    assert explain_drift(CONTEXT, ANSWER, CONTEXT.replace("Go", "Stop") + ANSWER + AFTER) == ("context_changed",)
    assert explain_drift(CONTEXT, ANSWER, CONTEXT + ANSWER.replace("W", "w"), tools="changed") == ("tools_changed",)
    other = CONTEXT.replace('{"a": 1}', '{"b": 1}')
    assert explain_drift(CONTEXT, ANSWER, other + ANSWER, tools="rewritten") == ("tools_rewritten",)
    with_thought = CONTEXT.replace("Go.", "Go.<|im_end|>\n<|im_start|>assistant\n<think>\nold\n</think>\n\nYes.")
    assert explain_drift(with_thought, ANSWER, with_thought.replace("<think>\nold\n</think>\n\n", "") + ANSWER) == (
        "reasoning_dropped",
    )


def test_reasoning_without_tags_is_found_by_its_text() -> None:
    thought = "[thought] I look for it. [/thought]"
    actual = CONTEXT + "[thought]  [/thought]Yes.<|im_end|>"
    assert explain_drift(CONTEXT, thought + "Yes.<|im_end|>", actual, reasoning=["I look for it."]) == (
        "reasoning_dropped",
    )
    assert explain_drift(CONTEXT, thought + "Yes.<|im_end|>", actual) == ("answer_changed",)


def test_prompt_that_ends_within_the_answer_is_a_changed_answer() -> None:
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
def test_canonical_json_is_independent_of_formatting(value: dict[str, object], plain: bool, indent: int | None) -> None:
    one = json.dumps(value, ensure_ascii=plain, indent=indent)
    other = json.dumps(dict(reversed(value.items())), separators=(",", ":"))
    assert canonical_json(f"a {one} b") == canonical_json(f"a {other} b")


def test_canonical_json_keeps_other_braces() -> None:
    assert canonical_json('if (x) { y } {"b": 1, "a": {}} {') == 'if (x) { y } {"a":{},"b":1} {'


def test_every_cause_has_a_meaning_and_a_fix() -> None:
    assert set(CAUSE_MEANINGS) == set(CAUSE_FIXES)
