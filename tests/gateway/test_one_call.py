"""`parallel_tool_calls = false`: the agent, the record and the trained tokens have one call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any

import pytest

from polar_proxy.engines.one_call import OneCallLimit
from polar_proxy.engines.scripted import END, ScriptedEngine, ScriptedReply, call_text, decode
from polar_proxy.store import Store
from polar_proxy.traces.builders import build
from polar_proxy.traces.grades import excluded_calls
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, ToolCall, ToolDelta
from tests.conftest import Serve
from tests.factories import call
from tests.gateway.agents import client, recorded_calls

LS, PWD = ToolCall("c1", "bash", '{"command": "ls"}'), ToolCall("c2", "bash", '{"command": "pwd"}')
TOOL: Json = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
USER: Json = {"role": "user", "content": "look"}


def script(*calls: ToolCall) -> Any:
    def answer(request: EngineRequest) -> ScriptedReply:
        assert isinstance(request, ChatRequest)
        return ScriptedReply("done") if request.messages[-1].role == "tool" else ScriptedReply("I look. ", calls=calls)

    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_at_its_second_call(serve: Serve, store: Store, stream: bool) -> None:
    engine = ScriptedEngine(script(LS, PWD))
    async with serve(engine) as gateway, client(gateway.url) as http:
        body: Json = {"model": "m", "tools": [TOOL], "parallel_tool_calls": False}
        first = await http.post("/chat/completions", json={**body, "messages": [USER], "stream": stream})
        assert "ls" in first.text
        assert "pwd" not in first.text
        said: Json = {"role": "assistant", "content": "I look. ", "tool_calls": [LS.to_openai()]}
        result: Json = {"role": "tool", "tool_call_id": "c1", "content": "a.py"}
        await http.post("/chat/completions", json={**body, "messages": [USER, said, result]})
    one, two = await recorded_calls(store, 2)
    (choice,) = one.choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("tool_calls", (LS,))
    assert ("I look. " + call_text(LS)).startswith(decode(choice.token_ids.tolist()))
    assert engine.aborted == 1
    assert (two.edge, two.parent_call_id) == ("continues", one.call_id)
    assert "pwd" not in decode(two.prompt_ids.tolist())  # type: ignore[union-attr]
    (trace,) = build([one, two]).traces
    assert trace.call_ids == (one.call_id, two.call_id)


class SingleCallEngine(ScriptedEngine):
    """An engine whose chat template refuses an answer with two calls, as Llama 3 does."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, capabilities=super().info.capabilities | {"single_calls"})


async def test_an_answer_has_one_call_if_the_template_refuses_two(serve: Serve, store: Store) -> None:
    async with serve(SingleCallEngine(script(LS, PWD))) as gateway, client(gateway.url) as http:
        await http.post("/chat/completions", json={"model": "m", "tools": [TOOL], "messages": [USER]})
    (found,) = await recorded_calls(store, 1)
    assert found.choices[0].message.tool_calls == (LS,)


async def test_an_answer_with_one_call_keeps_its_end_of_turn(serve: Serve, store: Store) -> None:
    engine = ScriptedEngine(script(LS))
    async with serve(engine) as gateway, client(gateway.url) as http:
        body: Json = {"model": "m", "tools": [TOOL], "parallel_tool_calls": False, "messages": [USER]}
        await http.post("/chat/completions", json=body)
    (found,) = await recorded_calls(store, 1)
    ids = found.choices[0].token_ids.tolist()
    assert (decode(ids), ids[-1]) == ("I look. " + call_text(LS), END)
    assert engine.finished == 1


async def collect(limit: OneCallLimit, events: Iterable[SampleEvent]) -> list[SampleEvent]:
    async def replay() -> AsyncGenerator[SampleEvent, None]:
        for event in events:
            yield event

    return [event async for event in limit.apply(replay())]


def call_event(number: int, *ids: int) -> SampleEvent:
    return SampleEvent(tool_calls=(ToolDelta(number, f"c{number}", "bash", "{}"),), token_ids=ids)


async def test_tokens_that_begin_a_second_call_are_dropped() -> None:
    limit = OneCallLimit(1)
    events = [SampleEvent(text="I", token_ids=(1,)), call_event(0, 2), SampleEvent(token_ids=(3,)), call_event(1, 4)]
    shown = await collect(limit, [*events, SampleEvent(token_ids=(5,))])
    assert [event.token_ids for event in shown] == [(1,), (2,), ()]
    assert shown[-1].finish_reason == "tool_calls"
    assert not limit.hides_tokens


async def test_text_after_a_call_is_kept() -> None:
    events = [call_event(0, 1), SampleEvent(token_ids=(2,)), SampleEvent(text="so", token_ids=(3,))]
    end = SampleEvent(token_ids=(4,), finish_reason="tool_calls")
    assert await collect(OneCallLimit(1), [*events, end]) == [*events, end]


async def test_each_choice_ends_at_its_own_second_call() -> None:
    second = SampleEvent(1, text="done", token_ids=(9,), finish_reason="stop")
    shown = await collect(OneCallLimit(2), [call_event(0, 1), call_event(1, 2), call_event(2, 3), second])
    assert [(event.index, event.token_ids, event.finish_reason) for event in shown] == [
        (0, (1,), None),
        (0, (), "tool_calls"),
        (1, (9,), "stop"),
    ]


async def test_an_event_with_both_calls_is_not_trained() -> None:
    """Which of its tokens belong to the first call is not known."""
    limit = OneCallLimit(1)
    both = SampleEvent(
        tool_calls=(ToolDelta(0, "c0", "bash", "{}"), ToolDelta(1, "c1", "bash", "{}")), token_ids=(1, 2)
    )
    (shown,) = await collect(limit, [both])
    assert ([delta.index for delta in shown.tool_calls], shown.token_ids) == ([0], (1, 2))
    assert limit.hides_tokens
    recorded = call("a", 0.0, [1], [2], sampling={"temperature": 1.0, "hidden_call": True})
    assert excluded_calls([recorded]) == {recorded.call_id: "hidden_call"}
