"""Answers in the format of a chat template, over templates in the styles of real model families."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks._families.families import Family
from benchmarks._families.template_engine import TemplateEngine
from polar_proxy.engines.vllm.client import VllmClient
from polar_proxy.engines.vllm.target_answers import TOOL, USER, find_end_of_reasoning
from polar_proxy.types import ChatRequest, Json, Message

ANSWER = """\
{%- macro calls(message) %}{% for call in message.tool_calls or [] %}<|tool|>{{ call.function.name }}{% endfor %}\
{% endmacro %}"""
TEMPLATE = (
    ANSWER
    + """\
{%- for message in messages %}<|{{ message.role }}|>{% if CONDITION %}<|think|>{{ message.reasoning_content }}<|done|>\
{% endif %}{{ calls(message) }}{{ message.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
)


@pytest.mark.parametrize(
    ("shown_if", "end"),
    [
        ("message.reasoning_content", "<|done|>"),
        # Gemma 4
        ("message.reasoning_content and message.tool_calls", "<|done|>"),
        ("false", None),
    ],
)
async def test_finds_the_token_that_ends_reasoning(shown_if: str, end: str | None) -> None:
    engine = TemplateEngine(Family("family", TEMPLATE.replace("CONDITION", shown_if), ("<|end|>",), ""))

    async def render(messages: list[Json], generation: bool) -> list[int]:
        read = tuple(Message.from_openai({"content": None, **message}) for message in messages)
        return await engine.render(ChatRequest("m", read, tools=(TOOL,)), generation=generation)

    found = await find_end_of_reasoning(cast(VllmClient, engine), render, USER)
    assert found == (None if end is None else engine.tokenizer.token_to_id(end))
