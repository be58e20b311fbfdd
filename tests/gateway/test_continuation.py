"""Continue mode over real HTTP: each turn is sampled from exactly the tokens of the turn before."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from polar_proxy.engines.scripted import END, INFO, Reply, ScriptedEngine, decode, encode
from polar_proxy.errors import EngineError
from polar_proxy.sessions import hash_key
from polar_proxy.store import Store
from polar_proxy.traces import BUILDERS
from polar_proxy.types import CallRecord, ChatRequest, EngineInfo, EngineRequest, ToolCall
from tests.conftest import Serve

SAMPLED = '{"flag":true,  "text": "caf\\u00e9", "n": 1.0}'
ECHOED = '{"text": "café", "flag": true, "n": 1}'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


def script(request: EngineRequest) -> Reply:
    assert isinstance(request, ChatRequest)
    last = request.messages[-1]
    if last.role == "user" and "look" in str(last.content):
        calls = (ToolCall("call_a", "look", SAMPLED), ToolCall("call_b", "look", "{}"))
        return Reply(text="I look.", reasoning="Hm, where?", calls=calls)
    return Reply(text=f"Done after {len(request.messages)}.", reasoning="Well.")


class Talk:
    """One conversation over Chat Completions, whose history comes back as a harness writes it."""

    def __init__(self, http: httpx.AsyncClient, **body: Any) -> None:
        self._http = http
        self._body = body
        self.messages: list[Any] = []

    async def say(self, *messages: Any, **body: Any) -> Any:
        self.messages += messages
        given = {"model": "m", "messages": self.messages, **self._body, **body}
        answer = await self._http.post("/chat/completions", json=given)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    def echo(self, message: Any, **changes: Any) -> None:
        """Take the answer into the history, without its reasoning and with its arguments printed anew."""
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


def http_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url + "/v1", headers={"authorization": "Bearer k1"}, timeout=120)


async def calls_of(store: Store) -> list[CallRecord]:
    (session,) = await store.sessions.recent()
    return list(await store.calls.of_session(session.session_id))


def whole(call: CallRecord) -> list[int]:
    assert call.prompt_ids is not None
    return [*call.prompt_ids.tolist(), *call.choices[0].token_ids.tolist()]


async def two_rounds(http: httpx.AsyncClient) -> None:
    talk = Talk(http, tools=[TOOL])
    choice = await talk.say({"role": "system", "content": "S"}, user("look"))
    talk.echo(choice["message"])
    choice = await talk.say(*results(choice["message"]))
    talk.echo(choice["message"], content=choice["message"]["content"] + "\n")
    await talk.say(user("and now?"))


async def test_what_only_looks_changed_is_no_drift(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script)) as gateway, http_of(gateway.url) as http:
        await two_rounds(http)
    first, second, third = await calls_of(store)
    assert (first.prompt_mode, first.prompt_reason, first.base_call_id) == ("render", "no_base", None)
    for before, call in ((first, second), (second, third)):
        assert (call.prompt_mode, call.prompt_reason) == ("continue", None)
        assert (call.base_call_id, call.base_choice) == (before.call_id, 0)
        assert whole(call)[: len(whole(before))] == whole(before)
    assert "Hm, where?" in decode(whole(third)), "reasoning stays as it was sampled"
    assert SAMPLED in decode(whole(third))
    assert ECHOED not in decode(whole(third))
    behind = whole(second)[len(whole(first)) :]
    assert decode(behind).startswith("tool:result 0tool:result 1assistant:")
    (trace,) = BUILDERS["merged"]([first, second, third]).traces
    assert trace.token_ids.tolist() == whole(third)
    assert second.sampling["past_reasoning"] == "keep"


async def test_observed_the_same_run_drifts(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script), prompt_mode="render") as gateway, http_of(gateway.url) as http:
        await two_rounds(http)
    first, second, third = await calls_of(store)
    assert [call.prompt_reason for call in (first, second, third)] == ["no_base", "off", "off"]
    assert [call.base_call_id for call in (first, second, third)] == [None, first.call_id, second.call_id]
    assert whole(second)[: len(whole(first))] != whole(first)
    assert len(BUILDERS["merged"]([first, second, third]).traces) == 3


async def test_the_session_may_choose(serve: Serve, store: Store) -> None:
    policy = {"prompt_mode": "render"}
    await store.sessions.create(key_hash=hash_key("k1"), label=None, rollout_id=None, policy=policy, origin="key")
    async with serve(ScriptedEngine(script)) as gateway, http_of(gateway.url) as http:
        await two_rounds(http)
    assert {call.prompt_mode for call in await calls_of(store)} == {"render"}


async def test_after_a_restart_the_base_comes_from_the_store(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script)) as gateway, http_of(gateway.url) as http:
        talk = Talk(http, tools=[TOOL])
        choice = await talk.say(user("look"))
    async with serve(ScriptedEngine(script)) as gateway, http_of(gateway.url) as http:
        talk._http = http
        talk.echo(choice["message"])
        await talk.say(*results(choice["message"]))
    first, second = await calls_of(store)
    assert second.prompt_mode == "continue"
    assert whole(second)[: len(whole(first))] == whole(first)


async def test_a_cut_answer_is_closed(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(lambda request: Reply("0123456789" * 5))) as gateway, http_of(gateway.url) as http:
        talk = Talk(http)
        choice = await talk.say(user("hi"), max_tokens=7)
        assert choice["finish_reason"] == "length"
        talk.echo(choice["message"])
        await talk.say(user("go on"))
    first, second = await calls_of(store)
    assert first.choices[0].token_ids.tolist() == encode("0123456")
    assert second.prompt_mode == "continue"
    assert whole(second)[len(whole(first))] == END
    assert whole(second)[: len(whole(first))] == whole(first)


async def test_the_chosen_answer_of_several_is_continued(serve: Serve, store: Store) -> None:
    answers = iter(["one", "two", "three", "next"])

    class Several(ScriptedEngine):
        async def sample(self, request, *, stream=True, prompt=None):  # type: ignore[no-untyped-def, override]
            for index in range(request.sampling.n):
                self.script = lambda _: Reply(next(answers))
                one = ChatRequest(request.model, request.messages)
                async for event in super().sample(one, stream=stream, prompt=prompt):
                    yield type(event)(**{**{name: getattr(event, name) for name in event.__slots__}, "index": index})

    async with serve(Several()) as gateway, http_of(gateway.url) as http:
        body = {"model": "m", "messages": [user("hi")], "n": 3}
        given = (await http.post("/chat/completions", json=body)).json()["choices"]
        assert [choice["message"]["content"] for choice in given] == ["one", "two", "three"]
        talk = Talk(http)
        talk.messages = [user("hi"), {"role": "assistant", "content": "two"}]
        await talk.say(user("why?"))
    first, second = await calls_of(store)
    assert (second.base_call_id, second.base_choice, second.prompt_mode) == (first.call_id, 1, "continue")
    assert first.prompt_ids is not None
    expected = [*first.prompt_ids.tolist(), *encode("two"), END]
    assert whole(second)[: len(expected)] == expected


async def change_tools(talk: Talk) -> None:
    await talk.say(user("more"), tools=[TOOL, OTHER_TOOL])


async def reorder_tools(talk: Talk) -> None:
    turned = {"function": {"parameters": {"type": "object"}, "name": "look"}, "type": "function"}
    await talk.say(user("more"), tools=[turned])


async def change_options(talk: Talk) -> None:
    await talk.say(user("more"), chat_template_kwargs={"enable_thinking": False})


async def rewind(talk: Talk) -> None:
    del talk.messages[1:]
    await talk.say(user("something else"))


async def edit(talk: Talk) -> None:
    talk.messages[1] = {**talk.messages[1], "content": "I never said that."}
    await talk.say(user("more"))


async def forced(talk: Talk) -> None:
    await talk.say(user("more"), tool_choice="required")


async def picture(talk: Talk) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    await talk.say({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})


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
async def test_what_is_honoured_as_a_change(
    serve: Serve, store: Store, act: Any, mode: str, reason: str | None
) -> None:
    async with serve(ScriptedEngine(script)) as gateway, http_of(gateway.url) as http:
        talk = Talk(http, tools=[TOOL])
        talk.echo((await talk.say(user("hello")))["message"])
        await act(talk)
    _, last = await calls_of(store)
    assert (last.prompt_mode, last.prompt_reason) == (mode, reason)


async def test_rewinding_to_an_earlier_turn_continues_that_turn(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script)) as gateway, http_of(gateway.url) as http:
        talk = Talk(http)
        talk.echo((await talk.say(user("one")))["message"])
        talk.echo((await talk.say(user("two")))["message"])
        del talk.messages[2:]
        await talk.say(user("other"))
    first, _, third = await calls_of(store)
    assert (third.base_call_id, third.prompt_mode) == (first.call_id, "continue")
    assert whole(third)[: len(whole(first))] == whole(first)


class Stripping(ScriptedEngine):
    """Its template drops the reasoning of all turns but those behind the last user message."""

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
async def test_older_reasoning(serve: Serve, store: Store, policy: str, mode: str, reason: str | None) -> None:
    engine = Stripping(script)
    async with serve(engine, past_reasoning=policy) as gateway, http_of(gateway.url) as http:
        talk = Talk(http)
        for text in ("one", "two"):
            message = (await talk.say(user(text)))["message"]
            talk.messages.append(message)
    _, second = await calls_of(store)
    assert (second.prompt_mode, second.prompt_reason) == (mode, reason)
    assert ("Well." in decode(second.prompt_ids.tolist())) is (policy == "keep")  # type: ignore[union-attr]
    assert second.sampling["past_reasoning"] == policy


class Numbering(ScriptedEngine):
    """Its template counts the messages, so that what follows an answer depends on all that came before."""

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        return [*await super().render(request, generation=generation), *encode(f"{len(request.messages)}:")]


async def test_a_suffix_that_is_not_the_engines_own_is_refused(serve: Serve, store: Store) -> None:
    async with serve(Numbering(script)) as gateway, http_of(gateway.url) as http:
        talk = Talk(http)
        for text in ("one", "two", "three"):
            talk.echo((await talk.say(user(text)))["message"])
    _, second, third = await calls_of(store)
    assert {call.prompt_reason for call in (second, third)} == {"suffix_unproven"}
    assert second.prompt_ids is not None
    assert second.prompt_ids.tolist()[-2:] == encode("3:"), "the engine rendered it"


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"capabilities": INFO.capabilities - {"continue"}}, "engine_cannot"),
        ({"eos_token_ids": (4_000,)}, "stop_sequence"),
        ({"context_length": 40}, "context_full"),
    ],
)
async def test_what_the_engine_is_not_able_to(serve: Serve, store: Store, info: Any, reason: str) -> None:
    given = EngineInfo(**{**{name: getattr(INFO, name) for name in INFO.__slots__}, **info})
    async with serve(ScriptedEngine(script, info=given)) as gateway, http_of(gateway.url) as http:
        talk = Talk(http)
        talk.echo((await talk.say(user("hi")))["message"])
        await talk.say(user("more"))
    _, second = await calls_of(store)
    assert (second.prompt_mode, second.prompt_reason) == ("render", reason)


async def test_weights_that_change_while_they_sample(serve: Serve, store: Store) -> None:
    class Moving(ScriptedEngine):
        told = False
        asked = 0

        async def weight_version(self) -> str | None:
            self.asked += 1
            return str(self.asked)

        async def sample(self, request, *, stream=True, prompt=None):  # type: ignore[no-untyped-def, override]
            number = 0
            async for event in super().sample(request, stream=stream, prompt=prompt):
                number += 1
                values = {name: getattr(event, name) for name in event.__slots__}
                yield type(event)(**{**values, "weight_version": f"v{min(number, 2)}" if self.told else None})

    engine = Moving(lambda request: Reply("0123456789" * 3))
    async with serve(engine) as gateway, http_of(gateway.url) as http:
        await Talk(http).say(user("one"))
        engine.told = True
        await Talk(http).say(user("two"))
    untold, told = await calls_of(store)
    assert untold.weight_version == "1..2"
    assert untold.choices[0].versions == ()
    assert told.weight_version == "v2"
    assert told.choices[0].versions == ((0, "v1"), (12, "v2"))
    np.testing.assert_array_equal(told.choices[0].token_ids, [*encode("0123456789" * 3), END])


async def test_an_engine_that_dies_behind_its_answer_loses_no_call(serve: Serve, store: Store) -> None:
    class Dying(ScriptedEngine):
        asked = 0

        async def weight_version(self) -> str | None:
            self.asked += 1
            if self.asked > 1:
                raise EngineError("The engine is gone.")
            return "7"

    async with serve(Dying(lambda request: Reply("last words"))) as gateway, http_of(gateway.url) as http:
        await Talk(http).say(user("one"))
    (call,) = await calls_of(store)
    assert (call.status, call.weight_version) == ("ok", "7")
