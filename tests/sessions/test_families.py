"""Prompts are continued right, or not at all, over chat templates in the styles of real model families.

The templates are our own. `benchmarks/families.py --templates` runs the same conversations over 70 real ones.
"""

from __future__ import annotations

import pytest

from benchmarks._families.continuing import FamilyResult, FamilyRun
from benchmarks._families.families import Family
from benchmarks._families.template_engine import TemplateEngine
from polar_proxy.sessions.marked_rendering import MARKINGS, Marker
from polar_proxy.types import Message, ToolCall

pytestmark = pytest.mark.slow

CALLS = """\
{%- macro calls(message) %}{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} \
{{ call.function.arguments | tojson }}</call>{% endfor %}{% endmacro %}"""
SYSTEM = "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|end|>{% endif %}"
TURNS = """\
{%- for message in messages %}{% if not (loop.first and message.role == 'system') %}\
<|{{ message.role }}|>{{ message.content }}{{ calls(message) }}<|end|>{% endif %}{% endfor %}"""
OPENING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = CALLS + SYSTEM + TURNS + OPENING


def changed(old: str, new: str, template: str = PLAIN) -> str:
    assert old in template
    return template.replace(old, new)


TEMPLATES = {
    "plain": PLAIN,
    # Cohere: tool results are numbered over the whole conversation.
    "tool index": changed(
        "<|{{ message.role }}|>{{ message.content }}",
        "<|{{ message.role }}|>{% if message.role == 'tool' %}{% set count.n = count.n + 1 %}[{{ count.n }}]{% endif %}"
        "{{ message.content }}",
        "{% set count = namespace(n=0) %}" + PLAIN,
    ),
    # SmolLM3, Nemotron-Nano: a flag in the system message decides how an answer is opened.
    "flag": changed(
        "<|assistant|>{% endif %}",
        "<|assistant|>{% if '/no_think' in messages[0].content %}<think></think>{% endif %}{% endif %}",
        changed("{{ messages[0].content }}", "{{ messages[0].content.replace('/no_think', '').rstrip() }}"),
    ),
    # Gemma 4: reasoning is shown beside calls only, and after the last user message only.
    "reasoning beside calls": changed(
        "{{ message.content }}{{ calls",
        "{% if message.tool_calls and message.reasoning_content and loop.index0 > last.n %}<|channel>thought\n"
        "{{ message.reasoning_content }}\n<channel|>{% endif %}{{ message.content }}{{ calls",
        "{% set last = namespace(n=0) %}{% for message in messages %}{% if message.role == 'user' %}"
        "{% set last.n = loop.index0 %}{% endif %}{% endfor %}" + PLAIN,
    ),
    # gpt-oss, Llama 3: today's date in the system message.
    "date": changed("<|system|>", "<|system|>Today is {{ strftime_now('%Y-%m-%d') }}. "),
    # Qwen3: reasoning is shown after the last user message only, where an empty one is shown too.
    "reasoning": changed(
        "{{ message.content }}{{ calls",
        "{% if message.role == 'assistant' and loop.index0 > last.n %}<think>{{ message.reasoning_content or '' }}"
        "</think>{% endif %}{{ message.content }}{{ calls",
        "{% set last = namespace(n=0) %}{% for message in messages %}{% if message.role == 'user' %}"
        "{% set last.n = loop.index0 %}{% endif %}{% endfor %}" + PLAIN,
    ),
    # Qwen3, Llama 3 and others: texts are trimmed.
    "trimmed": changed("{{ message.content }}{{ calls", "{{ message.content | trim }}{{ calls"),
    # Qwen2.5 and others: consecutive tool results share one turn.
    "merged results": changed(
        "<|{{ message.role }}|>{{ message.content }}{{ calls(message) }}<|end|>",
        "{% if message.role != 'tool' or messages[loop.index0 - 1].role != 'tool' %}<|{{ message.role }}|>{% endif %}"
        "{{ message.content }}{{ calls(message) }}"
        "{% if message.role != 'tool' or loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>{% endif %}",
    ),
    # Gemma 2: the system message is part of the first user message.
    "system in first user": changed(
        "<|{{ message.role }}|>",
        "<|{{ message.role }}|>{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content }} "
        "{% endif %}",
        CALLS + TURNS + OPENING,
    ),
    # DeepSeek-V3.1, MiniMax-M2: all system messages are gathered at the front.
    "gathered system": CALLS
    + "{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}"
    + changed("not (loop.first and message.role == 'system')", "message.role != 'system'", TURNS)
    + OPENING,
    # Mistral-Nemo: the system message moves to the last user message.
    "system in last user": changed(
        "<|{{ message.role }}|>",
        "<|{{ message.role }}|>{% if loop.index0 == last.n and messages[0].role == 'system' %}"
        "{{ messages[0].content }} {% endif %}",
        "{% set last = namespace(n=0) %}{% for message in messages %}{% if message.role == 'user' %}"
        "{% set last.n = loop.index0 %}{% endif %}{% endfor %}" + CALLS + TURNS + OPENING,
    ),
    # GLM: nothing closes an answer; the model samples the header of the next message.
    "header ends": PLAIN.replace("<|end|>", ""),
    # Apriel-1.5: an answer is closed by two tokens.
    "two ends": changed(
        "{{ calls(message) }}<|end|>",
        "{{ calls(message) }}<|end|>{% if message.role == 'assistant' %} <|end|>{% endif %}",
    ),
    # LFM2, Granite 3.3: tool calls of past answers are not shown.
    "no calls shown": changed("{{ calls(message) }}", ""),
}
STOPS = {"header ends": ("<|endoftext|>", "<|user|>", "<|tool|>", "<|system|>", "<|developer|>")}


async def run(name: str) -> FamilyResult:
    family = Family(name, TEMPLATES[name], STOPS.get(name, ("<|end|>", "<|endoftext|>")), "")

    async def nothing_stored(call_id: str) -> None:
        return None

    return await FamilyRun(TemplateEngine(family), nothing_stored).run()


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"system in last user"}))
async def test_continues_every_turn_and_none_wrong(name: str) -> None:
    result = await run(name)
    assert result.grade == "all", str(result)
    assert {turn.result for turn in result.cases["white space"]} == {"right"}, str(result)


async def test_does_not_continue_where_the_system_message_moves() -> None:
    result = await run("system in last user")
    after_user = [result.turns[0], result.turns[4]]
    assert {turn.reason for turn in after_user} == {"history_changed"}
    assert result.grade == "some", str(result)


@pytest.mark.parametrize("name", ["plain", "gathered system"])
async def test_later_system_messages_are_in_the_prompt_or_refused(name: str) -> None:
    (turn, *others) = (await run(name)).cases["later system"]
    assert turn.result == ("right" if name == "plain" else "refused"), str(turn)
    assert {other.result for other in others} == {"right"}


@pytest.mark.parametrize(
    ("arguments", "marked"),
    [
        ('{"b":"x","a" : ["\\"", 1]}', '{"b":"<x>","a" : ["<\\">", 1]}'),
        ("not JSON", "not JSON>"),
    ],
)
def test_marks_change_nothing_else_in_arguments(arguments: str, marked: str) -> None:
    """Some templates print the text of arguments, which a harness has serialised in its own way."""
    marker = Marker("mark")
    (message,) = marker.mark([Message("assistant", "", tool_calls=(ToolCall("c", "look", arguments),))], MARKINGS[0])
    (call,) = message.tool_calls
    assert marker.unmark(call.arguments) == arguments
    assert call.arguments == marked.replace("<", "markn0z").replace(">", "markn0z")


@pytest.mark.parametrize("arguments", ["{}", '{"n": 1}', ""])
def test_a_call_without_strings_is_marked_after_its_name(arguments: str) -> None:
    message = Message("assistant", "", tool_calls=(ToolCall("c", "look", arguments),))
    (marked,) = Marker("mark").mark([message], MARKINGS[0])
    assert marked.tool_calls == (ToolCall("c", "lookmarkn0c", arguments),)


async def test_later_developer_messages_that_the_engine_moves_are_refused() -> None:
    turn = (await run("plain")).cases["later developer"][0]
    assert (turn.result, turn.reason) == ("refused", "message_lost")
