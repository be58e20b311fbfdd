"""Scripted engines: one that solves `swe-task` like the expert of `examples/tiny_policy`, and one that fails."""

from __future__ import annotations

import orjson

from examples.tiny_policy.expert import LostError, next_action
from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine, ScriptedReply
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineRequest, ToolCall, new_id


def play(request: EngineRequest) -> ScriptedAnswer:
    assert isinstance(request, ChatRequest)
    try:
        action = next_action([message.to_openai() for message in request.messages])
    except LostError as error:
        return RequestError(str(error))
    return ToolCall(new_id("call"), "bash", orjson.dumps({"command": action.command}).decode())


class PlayerEngine(ScriptedEngine):
    """For `--engine tests.fakes.player:PlayerEngine`."""

    def __init__(self, pace: float = 0.0) -> None:
        super().__init__(play, pace=pace)


class BrokenEngine(ScriptedEngine):
    """Fails after the text `begun` of every answer."""

    def __init__(self, begun: str = "he") -> None:
        reply = ScriptedReply(begun, error=EngineError("The scripted engine broke."))
        super().__init__(lambda request: reply)
