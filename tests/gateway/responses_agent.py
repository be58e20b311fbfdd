"""An agent of the Responses API with two tools, for tests of conversations, stored responses and the WebSocket."""

from __future__ import annotations

from typing import Any

from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine, ScriptedReply
from polar_proxy.types import ChatRequest, EngineRequest, ToolCall

TOOLS: Any = [
    {"type": "function", "name": "bash", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch", "description": "Edit files."},
]
CALLS = (ToolCall("c0", "bash", '{"command":"ls"}'), ToolCall("c1", "apply_patch", '{"input": "*** Begin Patch"}'))
OUTPUTS: Any = [
    {"type": "function_call_output", "call_id": "c0", "output": "ok"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
]


def two_step_engine() -> ScriptedEngine:
    """Return an engine that thinks, writes and calls both tools, and after their outputs answers "done"."""

    def script(request: EngineRequest) -> ScriptedAnswer:
        assert isinstance(request, ChatRequest)
        first = ScriptedReply("let me see", "hm", CALLS)
        return "done" if any(message.role == "tool" for message in request.messages) else first

    return ScriptedEngine(script)
