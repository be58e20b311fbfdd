"""Responses in the background: the id is returned at once, the answer is retrieved later, the call can be cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.gateway.responses import background, stored_responses
from polar_proxy.store import Store
from polar_proxy.types import CallRecord
from tests.conftest import Serve
from tests.fakes.player import BrokenEngine
from tests.gateway.agents import client, connected_sdk, new_session, recorded_calls
from tests.until import GUARD_SECONDS

pytestmark = pytest.mark.slow

SLOW = ScriptedReply("hello", pace=30.0)


def slow_engine() -> ScriptedEngine:
    return ScriptedEngine(lambda request: SLOW)


async def start(sdk: AsyncOpenAI, **fields: Any) -> Response:
    answer = await sdk.responses.create(model="m", input="hi", background=True, **fields)
    assert isinstance(answer, Response)
    Response.model_validate(answer.to_dict(), strict=True)
    assert (answer.status, answer.background, answer.output) == ("queued", True, [])
    return answer


async def ended(sdk: AsyncOpenAI, identity: str) -> Response:
    async with asyncio.timeout(GUARD_SECONDS):
        while (found := await sdk.responses.retrieve(identity)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    Response.model_validate(found.to_dict(), strict=True)
    return found


async def test_retrieves_the_answer_when_it_is_complete(serve: Serve, store: Store) -> None:
    gate = asyncio.Event()

    class Waiting(ScriptedEngine):
        async def weight_version(self) -> str | None:
            await gate.wait()
            return await super().weight_version()

    async with connected_sdk(serve, Waiting()) as sdk:
        one = await start(sdk)
        assert (await sdk.responses.retrieve(one.id)).status == "in_progress"
        gate.set()
        found = await ended(sdk, one.id)
        assert (found.status, found.output_text) == ("completed", "hello")
        two = await sdk.responses.create(model="m", input="go on", previous_response_id=one.id)
        assert two.status == "completed"
        assert (await sdk.responses.cancel(one.id)).to_dict() == found.to_dict()
    first, second = await recorded_calls(store)
    assert (first.status, second.edge) == ("ok", "continues")


async def test_cancelled_response_is_recorded_and_retrieved_as_cancelled(serve: Serve, store: Store) -> None:
    engine = slow_engine()
    async with connected_sdk(serve, engine) as sdk:
        one = await start(sdk)
        cancelled = await sdk.responses.cancel(one.id)
        assert (cancelled.status, cancelled.id) == ("cancelled", one.id)
        assert (await sdk.responses.cancel(one.id)).status == "cancelled"
        assert (await ended(sdk, one.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="ended early"):
            await sdk.responses.retrieve(one.id, stream=True)
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.responses.create(model="m", input="go on", previous_response_id=one.id)
        assert refused.value.code == "previous_response_not_found"
    (call,) = await recorded_calls(store)
    assert call.status == "client_gone"
    assert engine.aborted == 1


async def test_cancelling_waits_a_bounded_time_for_the_record(
    serve: Serve, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordable = asyncio.Event()
    commit = store.calls.commit

    async def commit_later(record: CallRecord, *, large: bool = False) -> None:
        await recordable.wait()
        await commit(record, large=large)

    monkeypatch.setattr(store.calls, "commit", commit_later)
    monkeypatch.setattr(stored_responses, "_CANCEL_SECONDS", 0.1)
    async with connected_sdk(serve, slow_engine()) as sdk:
        one = await start(sdk)
        with pytest.raises(openai.InternalServerError, match="is cancelled, but was not recorded") as refused:
            await sdk.responses.cancel(one.id)
        assert (refused.value.status_code, refused.value.code) == (503, "not_recorded")
        assert refused.value.response.headers["retry-after"] == "1"
        recordable.set()
        assert (await ended(sdk, one.id)).status == "cancelled"


async def test_failed_response_has_the_error_message(serve: Serve) -> None:
    async with connected_sdk(serve, BrokenEngine()) as sdk:
        one = await start(sdk)
        found = await ended(sdk, one.id)
    assert found.status == "failed"
    assert found.error is not None
    assert (found.error.code, found.error.message) == ("server_error", "The scripted engine broke.")


async def test_running_response_is_unknown_to_other_sessions_and_cannot_be_used_yet(serve: Serve, store: Store) -> None:
    await new_session(store, "k2")
    async with connected_sdk(serve, slow_engine()) as sdk:
        one = await start(sdk)
        other = sdk.with_options(api_key="k2")
        for request in (other.responses.retrieve(one.id), other.responses.cancel(one.id)):
            with pytest.raises(openai.NotFoundError):
                await request
        for request in (
            sdk.responses.delete(one.id),
            sdk.responses.retrieve(one.id, stream=True),
            sdk.get(f"/responses/{one.id}/input_items", cast_to=object),
        ):
            with pytest.raises(openai.BadRequestError, match="still in progress"):
                await request
        assert (await sdk.responses.cancel(one.id)).status == "cancelled"


async def test_end_of_the_session_cancels(serve: Serve, store: Store) -> None:
    session_id = await new_session(store, "k1")
    async with serve(slow_engine()) as gateway, client(gateway.url) as http:
        answer = await http.post("/responses", json={"input": "hi", "background": True})
        assert answer.json()["status"] == "queued"
        gateway.end_session(session_id)
        await gateway.idle(session_id, GUARD_SECONDS)
    (call,) = await recorded_calls(store)
    assert call.status == "client_gone"


async def test_stopping_the_gateway_records_running_calls(
    serve: Serve, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = store.calls.commit

    async def commit_slowly(record: CallRecord, *, large: bool = False) -> None:
        await asyncio.sleep(0.5)
        await commit(record, large=large)

    monkeypatch.setattr(store.calls, "commit", commit_slowly)
    async with serve(slow_engine()) as gateway, client(gateway.url) as http:
        await http.post("/responses", json={"input": "hi", "background": True})
    (call,) = await recorded_calls(store)
    assert (call.status, call.error) == ("client_gone", "the gateway was stopped")


async def test_limits_the_running_responses_of_a_session(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_MOST_RUNNING", 2)
    async with connected_sdk(serve, slow_engine()) as sdk:
        requests = [sdk.responses.create(model="m", input=f"hi {number}", background=True) for number in range(5)]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        running = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert len(running) == 2
        refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
        assert ["in the background" in str(error) for error in refused] == [True] * 3
        for one in running:
            await sdk.responses.cancel(one.id)
        await sdk.responses.cancel((await start(sdk)).id)


@pytest.mark.parametrize(("fields", "param"), [({"stream": True}, "stream"), ({"store": False}, "background")])
async def test_impossible_combinations_are_refused(serve: Serve, fields: Any, param: str) -> None:
    async with serve(ScriptedEngine()) as gateway, client(gateway.url) as http:
        refused = await http.post("/responses", json={"input": "hi", "background": True, **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
