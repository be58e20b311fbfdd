"""Conversations with images, in every dialect: never continued, never trained, and refused by models that read text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from polar_proxy.engines.base import ExactPrompt
from polar_proxy.engines.chat_template import flat_text
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from polar_proxy.traces.builders import build
from polar_proxy.types import ChatRequest, EngineRequest, Json, SampleEvent
from tests.conftest import Serve
from tests.gateway.agents import client, only_call
from tests.gateway.test_continuation import ECHOED, TOOL, Conversation, recorded_calls, results, script, user

pytestmark = pytest.mark.slow

PIXELS = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PIXELS}"
REQUESTS: dict[str, Json] = {
    "/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}],
    },
    "/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]},
    "/messages": {
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}}],
            }
        ],
    },
    "beta/models/m:generateContent": {
        "contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": PIXELS}}]}]
    },
}
"""Path after `/v1`, and body."""


class TextEngine(ScriptedEngine):
    """An engine whose model reads text only, with the message of Polar's own chat templates."""

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        assert isinstance(request, ChatRequest)
        for message in request.messages:
            flat_text(message.content)
        async for event in super().sample(request, stream=stream, prompt=prompt):
            yield event


async def post(serve: Serve, engine: ScriptedEngine, path: str, **settings: Any) -> tuple[int, str]:
    async with serve(engine, **settings) as gateway, client(gateway.url) as http:
        answer = await http.post(f"{gateway.url}/v1{path}", json={"model": "m", **REQUESTS[path]})
    return answer.status_code, answer.text


@pytest.mark.parametrize("mode", ["continue", "render"])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_call_with_an_image_is_recorded_and_not_trained(
    serve: Serve, store: Store, path: str, mode: str
) -> None:
    status, text = await post(serve, ScriptedEngine(), path, prompt_mode=mode)
    assert status == 200, text
    call = await only_call(store)
    assert (call.prompt_mode, call.prompt_reason) == ("render", "images")
    assert call.prompt_ids is not None
    assert build([call]).excluded == {call.call_id: "images"}


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_model_that_reads_text_refuses_an_image_by_name(serve: Serve, store: Store, path: str) -> None:
    status, text = await post(serve, TextEngine(), path)
    assert status == 400
    assert "reads text only" in text
    assert "image_url" in text


async def test_the_drift_count_shows_an_image_in_a_conversation(serve: Serve, store: Store) -> None:
    async with serve(ScriptedEngine(script)) as gateway, client(gateway.url) as http:
        conversation = Conversation(http, tools=[TOOL])
        choice = await conversation.say(user("look"))
        conversation.echo(choice["message"])
        assert conversation.messages[-1]["tool_calls"][0]["function"]["arguments"] == ECHOED
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}
        await conversation.say(*results(choice["message"]), picture)
    first, second = await recorded_calls(store)
    built = build([first, second])
    assert built.excluded == {second.call_id: "images"}
    (event,) = built.drift_events
    assert (event.call_id, event.prompt_reason, event.outcome) == (second.call_id, "images", "excluded")
