"""Prompt mode `continue` over real HTTP: each turn is sampled from exactly the tokens of the turn before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from anthropic import AsyncAnthropic

from polar_proxy.engines.base import CannotContinueError, ExactPrompt
from polar_proxy.engines.scripted import END, INFO, ScriptedEngine, ScriptedReply, decode, encode
from polar_proxy.errors import EngineError
from polar_proxy.store import Store
from polar_proxy.traces.builders import build
from polar_proxy.types import CallRecord, ChatRequest, EngineRequest, TokenIds, ToolCall
from tests.conftest import Serve
from tests.gateway.agents import client, new_session, recorded_calls

pytestmark = pytest.mark.slow

SAMPLED = '{"flag":true,  "text": "caf\\u00e9", "n": 1.0}'
ECHOED = '{"text": "café", "flag": true, "n": 1}'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


def script(request: EngineRequest) -> ScriptedReply:
    assert isinstance(request, ChatRequest)
    last = request.messages[-1]
    if last.role == "user" and "look" in str(last.content):
        calls = (ToolCall("call_a", "look", SAMPLED), ToolCall("call_b", "look", "{}"))
        return ScriptedReply(text="I look.", reasoning="Hm, where?", calls=calls)
    return ScriptedReply(text=f"Done after {len(request.messages)}.", reasoning="Well.")


class Conversation:
    """A conversation over Chat Completions that echoes its history as harnesses do."""

    def __init__(self, http: httpx.AsyncClient, **body: Any) -> None:
        self.http = http
        self._body = body
        self.messages: list[Any] = []

    async def say(self, *messages: Any, **body: Any) -> Any:
        self.messages += messages
        given = {"model": "m", "messages": self.messages, **self._body, **body}
        answer = await self.http.post("/chat/completions", json=given)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def echo(self, message: Any, **changes: Any) -> None:
        """Add an answer to the history, without its reasoning and with its arguments serialised again."""
        kept = {key: value for key, value in message.items() if "reasoning" not in key}
        for call in kept.get("tool_calls") or ():
            if call["function"]["arguments"] == SAMPLED:
                call["function"]["arguments"] = ECHOED
        self.messages.append({**kept, **changes})


def results(message: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
        for number, call in enumerate(message["tool_calls"])
    ]


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def prompt_and_answer(call: CallRecord) -> list[int]:
    assert call.prompt_ids is not None
    return [*call.prompt_ids.tolist(), *call.choices[0].token_ids.tolist()]


async def two_rounds(http: httpx.AsyncClient) -> None:
    conversation = Conversation(http, tools=[TOOL])
    choice = await conversation.say({"role": "system", "content": "S"}, user("look"))
    conversation.echo(choice["message"])
    choice = await conversation.say(*results(choice["message"]))
    conversation.echo(choice["message"], content=choice["message"]["content"] + "\n")
    await conversation.say(user("and now?"))


async def test_reserialised_history_does_not_drift(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        await two_rounds(http)
    first, second, third = await recorded_calls(store)
    assert (first.prompt_mode, first.prompt_reason, first.base_call_id) == ("render", "no_base", None)
    for before, call in ((first, second), (second, third)):
        assert (call.prompt_mode, call.prompt_reason) == ("continue", None)
        assert (call.base_call_id, call.base_choice) == (before.call_id, 0)
        assert prompt_and_answer(call)[: len(prompt_and_answer(before))] == prompt_and_answer(before)
    assert "Hm, where?" in decode(prompt_and_answer(third)), "reasoning stays as it was sampled"
    assert SAMPLED in decode(prompt_and_answer(third))
    assert ECHOED not in decode(prompt_and_answer(third))
    suffix = prompt_and_answer(second)[len(prompt_and_answer(first)) :]
    assert decode(suffix).startswith("tool:result 0tool:result 1assistant:")
    (trace,) = build([first, second, third]).traces
    assert trace.token_ids.tolist() == prompt_and_answer(third)
    assert second.sampling["past_reasoning"] == "keep"


class CountingEngine(ScriptedEngine):
    """An engine that counts the conversations which it renders as text, for each request for such renderings."""

    def __init__(self) -> None:
        super().__init__(script)
        self.renderings: list[int] = []

    async def render_texts(self, requests: Sequence[ChatRequest], *, generation: bool = True) -> list[str]:
        self.renderings.append(len(requests))
        return await super().render_texts(requests, generation=generation)


async def test_the_history_of_a_turn_is_not_rendered_again(serve: Serve, store: Store) -> None:
    """With marks, it is the rendering of the turn before."""
    engine = CountingEngine()
    async with serve(engine) as gateway, client(gateway.url) as http:
        await two_rounds(http)
    assert [call.prompt_mode for call in await recorded_calls(store)] == ["render", "continue", "continue"]
    assert engine.renderings == [3, 2]


async def test_a_changed_history_is_rendered_again(serve: Serve, store: Store) -> None:
    engine = CountingEngine()
    async with serve(engine) as gateway, client(gateway.url) as http:
        conversation = Conversation(http, tools=[TOOL])
        conversation.echo((await conversation.say({"role": "system", "content": "S"}, user("look")))["message"])
        conversation.echo((await conversation.say(*results(conversation.messages[-1])))["message"])
        conversation.messages[0]["content"] = "S  "
        await conversation.say(user("and now?"))
    assert [call.prompt_mode for call in await recorded_calls(store)] == ["render", "continue", "continue"]
    assert engine.renderings == [3, 3]


async def test_the_same_run_drifts_in_render_mode(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script), prompt_mode="render") as gateway, client(gateway.url) as http:
        await two_rounds(http)
    first, second, third = await recorded_calls(store)
    assert [call.prompt_reason for call in (first, second, third)] == ["no_base", "off", "off"]
    assert [call.base_call_id for call in (first, second, third)] == [None, first.call_id, second.call_id]
    assert prompt_and_answer(second)[: len(prompt_and_answer(first))] != prompt_and_answer(first)
    assert len(build([first, second, third]).traces) == 3


async def test_the_sessions_policy_sets_the_prompt_mode(serve: Serve, store: Store) -> None:
    policy = {"prompt_mode": "render"}
    await new_session(store, "k1", policy)
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        await two_rounds(http)
    assert {call.prompt_mode for call in await recorded_calls(store)} == {"render"}


async def test_continues_from_the_store_after_a_restart(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        conversation = Conversation(http, tools=[TOOL])
        choice = await conversation.say(user("look"))
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        conversation.http = http
        conversation.echo(choice["message"])
        await conversation.say(*results(choice["message"]))
    first, second = await recorded_calls(store)
    assert second.prompt_mode == "continue"
    assert prompt_and_answer(second)[: len(prompt_and_answer(first))] == prompt_and_answer(first)


async def test_adds_the_end_of_turn_to_a_cut_answer(serve: Serve, store: Store) -> None:
    async with (
        serve(ScriptedEngine(lambda request: ScriptedReply("0123456789" * 5))) as gateway,
        client(gateway.url) as http,
    ):
        conversation = Conversation(http)
        choice = await conversation.say(user("hi"), max_tokens=7)
        assert choice["finish_reason"] == "length"
        conversation.echo(choice["message"])
        await conversation.say(user("go on"))
    first, second = await recorded_calls(store)
    assert first.choices[0].token_ids.tolist() == encode("0123456")
    assert second.prompt_mode == "continue"
    assert prompt_and_answer(second)[len(prompt_and_answer(first))] == END
    assert prompt_and_answer(second)[: len(prompt_and_answer(first))] == prompt_and_answer(first)


async def test_continues_the_chosen_answer_of_several(serve: Serve, store: Store) -> None:
    answers = iter(["one", "two", "three", "next"])

    async with serve(ScriptedEngine(lambda request: next(answers))) as gateway, client(gateway.url) as http:
        body = {"model": "m", "messages": [user("hi")], "n": 3}
        given = (await http.post("/chat/completions", json=body)).json()["choices"]
        assert [choice["message"]["content"] for choice in given] == ["one", "two", "three"]
        conversation = Conversation(http)
        conversation.messages = [user("hi"), {"role": "assistant", "content": "two"}]
        await conversation.say(user("why?"))
    first, second = await recorded_calls(store)
    assert (second.base_call_id, second.base_choice, second.prompt_mode) == (first.call_id, 1, "continue")
    assert first.prompt_ids is not None
    expected = [*first.prompt_ids.tolist(), *encode("two"), END]
    assert prompt_and_answer(second)[: len(expected)] == expected


async def change_tools(conversation: Conversation) -> None:
    await conversation.say(user("more"), tools=[TOOL, OTHER_TOOL])


async def reorder_tools(conversation: Conversation) -> None:
    turned = {"function": {"parameters": {"type": "object"}, "name": "look"}, "type": "function"}
    await conversation.say(user("more"), tools=[turned])


async def change_options(conversation: Conversation) -> None:
    await conversation.say(user("more"), chat_template_kwargs={"enable_thinking": False})


async def rewind(conversation: Conversation) -> None:
    del conversation.messages[1:]
    await conversation.say(user("something else"))


async def edit(conversation: Conversation) -> None:
    conversation.messages[1] = {**conversation.messages[1], "content": "I never said that."}
    await conversation.say(user("more"))


async def forced(conversation: Conversation) -> None:
    await conversation.say(user("more"), tool_choice="required")


async def picture(conversation: Conversation) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    await conversation.say({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})


@pytest.mark.parametrize(
    ("act", "mode", "reason"),
    [
        (change_tools, "render", "tools_changed"),
        (reorder_tools, "continue", None),
        (change_options, "render", "template_options_changed"),
        (rewind, "render", "no_base"),
        (edit, "render", "no_base"),
        (forced, "render", "constrained"),
        (picture, "render", "images"),
    ],
)
async def test_does_not_continue_a_changed_request(
    serve: Serve, store: Store, act: Any, mode: str, reason: str | None
) -> None:
    info = replace(INFO, capabilities=INFO.capabilities | {"tool_choice_required"})
    async with serve(ScriptedEngine(script, info=info)) as gateway, client(gateway.url) as http:
        conversation = Conversation(http, tools=[TOOL])
        conversation.echo((await conversation.say(user("hello")))["message"])
        await act(conversation)
    _, last = await recorded_calls(store)
    assert (last.prompt_mode, last.prompt_reason) == (mode, reason)


async def test_a_rendered_answer_under_a_grammar_of_the_engines_own_is_recorded_as_constrained(
    serve: Serve, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's chat route samples some models' tool calls so. Exact prompts say it themselves (`ExactPrompt`)."""

    async def constrains(engine: ScriptedEngine, request: ChatRequest) -> bool:
        return bool(request.tools)

    monkeypatch.setattr(ScriptedEngine, "constrains", constrains)
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        await Conversation(http).say(user("hello"))
        await two_rounds(http)
    calls = await recorded_calls(store)
    assert [call.prompt_mode for call in calls] == ["render", "render", "continue", "continue"]
    assert [call.sampling.get("constrained") for call in calls] == [None, True, None, None]
    assert len(build(calls[:2]).excluded) == 1, "the constrained answer is not trained"


async def test_a_grammar_that_exact_prompts_cannot_have_is_the_reason_of_a_rendered_prompt(
    serve: Serve, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def constrains(engine: ScriptedEngine, request: ChatRequest) -> bool:
        return bool(request.tools)

    async def refuse(engine: ScriptedEngine, request: ChatRequest, token_ids: TokenIds) -> ExactPrompt:
        raise CannotContinueError("its grammar is not known.")

    monkeypatch.setattr(ScriptedEngine, "constrains", constrains)
    monkeypatch.setattr(ScriptedEngine, "accept_prompt", refuse)
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        await two_rounds(http)
    first, second, third = await recorded_calls(store)
    assert [call.prompt_reason for call in (first, second, third)] == ["no_base", "constrained", "constrained"]
    assert [call.sampling.get("constrained") for call in (first, second, third)] == [True, True, True]


async def test_rewinding_to_an_earlier_turn_continues_that_turn(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        conversation = Conversation(http)
        conversation.echo((await conversation.say(user("one")))["message"])
        conversation.echo((await conversation.say(user("two")))["message"])
        del conversation.messages[2:]
        await conversation.say(user("other"))
    first, _, third = await recorded_calls(store)
    assert (third.base_call_id, third.prompt_mode) == (first.call_id, "continue")
    assert prompt_and_answer(third)[: len(prompt_and_answer(first))] == prompt_and_answer(first)


class Stripping(ScriptedEngine):
    """An engine whose template drops reasoning, except in the turns after the last user message."""

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        last = max(place for place, message in enumerate(request.messages) if message.role == "user")
        messages = tuple(
            message if place > last else type(message)(message.role, message.content, tool_calls=message.tool_calls)
            for place, message in enumerate(request.messages)
        )
        shown = ChatRequest(request.model, messages, tools=request.tools)
        return await super().render(shown, generation=generation)


@pytest.mark.parametrize(
    ("policy", "mode", "reason"),
    [("keep", "continue", None), ("strip", "render", "reasoning_by_template")],
)
async def test_past_reasoning(serve: Serve, store: Store, policy: str, mode: str, reason: str | None) -> None:
    engine = Stripping(script)
    async with serve(engine, past_reasoning=policy) as gateway, client(gateway.url) as http:
        conversation = Conversation(http)
        for text in ("one", "two"):
            message = (await conversation.say(user(text)))["message"]
            conversation.messages.append(message)
    _, second = await recorded_calls(store)
    assert (second.prompt_mode, second.prompt_reason) == (mode, reason)
    assert ("Well." in decode(second.prompt_ids.tolist())) is (policy == "keep")  # type: ignore[union-attr]
    assert second.sampling["past_reasoning"] == policy


@pytest.mark.parametrize(
    ("policy", "mode", "reason"),
    [("keep", "continue", None), ("strip", "render", "reasoning_by_template")],
)
async def test_reasoning_that_the_client_moves_out_of_the_text_is_continued(
    serve: Serve, store: Store, policy: str, mode: str, reason: str | None
) -> None:
    """LiteLLM moves it, if the engine (vLLM without `--reasoning-parser`) leaves it in the text."""
    engine = Stripping(lambda request: "<think>\nWell.\n</think>\n\nDone.")
    async with serve(engine, past_reasoning=policy) as gateway, client(gateway.url) as http:
        conversation = Conversation(http)
        for text in ("one", "two", "three"):
            message = (await conversation.say(user(text)))["message"]
            assert message["content"] == "<think>\nWell.\n</think>\n\nDone."
            conversation.messages.append({**message, "content": "\n\nDone.", "reasoning_content": "\nWell.\n"})
    calls = await recorded_calls(store)
    assert [(call.edge, call.prompt_mode, call.prompt_reason) for call in calls] == [
        ("root", "render", "no_base"),
        ("continues", mode, reason),
        ("continues", mode, reason),
    ]
    assert len(build(calls).traces) == (1 if mode == "continue" else 3)


class Numbering(ScriptedEngine):
    """An engine whose template counts the messages, so what follows an answer depends on everything before it."""

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        return [*await super().render(request, generation=generation), *encode(f"{len(request.messages)}:")]


async def test_rejects_a_suffix_that_the_engine_does_not_render(serve: Serve, store: Store) -> None:
    async with serve(Numbering(script)) as gateway, client(gateway.url) as http:
        conversation = Conversation(http)
        for text in ("one", "two", "three"):
            conversation.echo((await conversation.say(user(text)))["message"])
    _, second, third = await recorded_calls(store)
    assert {call.prompt_reason for call in (second, third)} == {"history_changed"}
    assert second.prompt_ids is not None
    assert second.prompt_ids.tolist()[-2:] == encode("3:"), "the engine rendered it"


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"capabilities": INFO.capabilities - {"continue"}}, "engine_cannot"),
        ({"eos_token_ids": (250,)}, "other_end_of_turn"),
        ({"context_length": 40}, "context_full"),
    ],
)
async def test_records_why_the_engine_cannot_continue(serve: Serve, store: Store, info: Any, reason: str) -> None:
    async with serve(ScriptedEngine(script, info=replace(INFO, **info))) as gateway, client(gateway.url) as http:
        conversation = Conversation(http)
        conversation.echo((await conversation.say(user("hi")))["message"])
        await conversation.say(user("more"))
    _, second = await recorded_calls(store)
    assert (second.prompt_mode, second.prompt_reason) == ("render", reason)


@pytest.mark.parametrize(
    ("text", "stop", "reason"),
    [
        ("hi", [], "other_end_of_turn"),
        ("hi", ["never said"], "other_end_of_turn"),
        ("hi", ["user:", "after 1"], "stop_sequence"),
        ("look", [], "other_end_of_turn"),
    ],
    ids=["another end token", "another end token before the stop string", "the stop string", "after a tool call"],
)
async def test_records_how_an_answer_ended_that_is_not_continued(
    serve: Serve, store: Store, text: str, stop: list[str], reason: str
) -> None:
    """The engine ends answers with a token that is not among its `eos_token_ids`, as llama.cpp may."""
    engine = ScriptedEngine(script, info=replace(INFO, eos_token_ids=(250,)))
    async with serve(engine) as gateway, client(gateway.url) as http:
        conversation = Conversation(http, tools=[TOOL], stop=stop)
        answered = (await conversation.say(user(text)))["message"]
        conversation.echo(answered)
        await conversation.say(*(results(answered) if "tool_calls" in answered else [user("more")]))
    _, second = await recorded_calls(store)
    assert (second.prompt_mode, second.prompt_reason) == ("render", reason)


async def test_records_weights_that_change_while_sampling(serve: Serve, store: Store) -> None:
    class Moving(ScriptedEngine):
        versioned = False
        asked = 0

        async def weight_version(self) -> str | None:
            self.asked += 1
            return str(self.asked)

        async def sample(self, request, *, stream=True, prompt=None):  # type: ignore[no-untyped-def, override]
            number = 0
            async for event in super().sample(request, stream=stream, prompt=prompt):
                number += 1
                values = {name: getattr(event, name) for name in event.__slots__}
                yield type(event)(**{**values, "weight_version": f"v{min(number, 2)}" if self.versioned else None})

    engine = Moving(lambda request: ScriptedReply("0123456789" * 3))
    async with serve(engine) as gateway, client(gateway.url) as http:
        await Conversation(http).say(user("one"))
        engine.versioned = True
        await Conversation(http).say(user("two"))
    without, with_versions = await recorded_calls(store)
    assert without.weight_version == "1..2"
    assert without.choices[0].versions == ()
    assert with_versions.weight_version == "v2"
    assert with_versions.choices[0].versions == ((0, "v1"), (12, "v2"))
    np.testing.assert_array_equal(with_versions.choices[0].token_ids, [*encode("0123456789" * 3), END])


async def test_an_engine_that_dies_after_its_answer_loses_no_call(serve: Serve, store: Store) -> None:
    class Dying(ScriptedEngine):
        asked = 0

        async def weight_version(self) -> str | None:
            self.asked += 1
            if self.asked > 1:
                raise EngineError("The engine is gone.")
            return "7"

    async with serve(Dying(lambda request: ScriptedReply("last words"))) as gateway, client(gateway.url) as http:
        await Conversation(http).say(user("one"))
    (call,) = await recorded_calls(store)
    assert (call.status, call.weight_version) == ("ok", "7")


async def test_a_call_that_failed_before_its_version_was_known_has_no_version(serve: Serve, store: Store) -> None:
    class Recovering(ScriptedEngine):
        asked = 0

        async def weight_version(self) -> str | None:
            self.asked += 1
            if self.asked == 1:
                raise EngineError("The engine is gone.")
            return "7"

    async with serve(Recovering()) as gateway, client(gateway.url) as http:
        answer = await http.post("/chat/completions", json={"model": "m", "messages": [user("one")]})
    assert answer.status_code == 502
    (call,) = await recorded_calls(store)
    assert (call.status, call.weight_version) == ("upstream_error", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_that_an_anthropic_client_never_saw_stays_in_the_prompt(
    serve: Serve, store: Store, stream: bool
) -> None:
    """Without `thinking` in the request no block of it is sent, and the next prompt has it as it was sampled."""
    messages: list[Any] = [user("look")]
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    async with (
        serve(ScriptedEngine(script)) as gateway,
        AsyncAnthropic(base_url=gateway.url, api_key="k1", max_retries=0, timeout=120) as anthropic,
    ):
        for _ in range(3):
            body: Any = {"model": "m", "max_tokens": 500, "messages": messages, "tools": tools}
            if stream:
                async with anthropic.messages.stream(**body) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await anthropic.messages.create(**body)
            assert answer.content[0].type == "text"
            assert "thinking" not in [block.type for block in answer.content]
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            calls = [block.id for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call, "content": "ok"} for call in calls]
            messages.append({"role": "user", "content": results or "and now?"})
    first, second, third = await recorded_calls(store)
    assert [call.choices[0].message.reasoning for call in (first, second, third)] == ["Hm, where?", "Well.", "Well."]
    for before, call in ((first, second), (second, third)):
        assert (call.prompt_mode, call.base_call_id) == ("continue", before.call_id)
        assert prompt_and_answer(call)[: len(prompt_and_answer(before))] == prompt_and_answer(before)
    (trace,) = build([first, second, third]).traces
    assert trace.token_ids.tolist() == prompt_and_answer(third)
