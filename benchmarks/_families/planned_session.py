"""A session of eleven calls in which everything is planned: what the agent sends and what the model answers.

The agent sends its history again as agents do: the arguments of tool calls are parsed and serialised in another form,
and one of two agents drops reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from polar_proxy.conformance.awkward_answers import STYLES, to_json
from polar_proxy.engines.scripted import ScriptedReply
from polar_proxy.types import Json, Message, ToolCall

TOOLS: tuple[Json, ...] = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "array", "items": {"type": "integer"}},
                    "deep": {"type": "boolean"},
                    "filter": {"type": "object"},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "list_files",
            "description": "List files.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
_NESTED = {"any": [{"name": "caf\u00e9"}, {"size": 2}], "not": {"deep": {"empty": []}}}


def _call(number: int, name: str = "look", **arguments: Any) -> ToolCall:
    return ToolCall(f"polar{number:04}", name, json.dumps(arguments, ensure_ascii=False))


PLAN: tuple[tuple[str, ScriptedReply], ...] = (
    ("Hello. Who are you?", ScriptedReply("I read files.", "A greeting.")),
    ("Read a.txt.", ScriptedReply("I look.", "One call does it.", (_call(1, path="a.txt"),))),
    ("", ScriptedReply("", "Two more.", (_call(2, path="b/c.txt"), _call(3, path="d.txt", deep=True)))),
    ("", ScriptedReply("", "", (_call(4, path="caf\u00e9 \u201cq\u201d 'r' \"s\"\n\tline {x} <y> \\ \U0001f642"),))),
    ("", ScriptedReply("", "No arguments.", (_call(5, "list_files"),))),
    ("", ScriptedReply("\n\nThere are four files. \n", "\n- one\n-  two\n")),
    ("And what is in line 2?", ScriptedReply("", "Nested.\n\nYes.", (_call(6, lines=[2, -10], filter=_NESTED),))),
    ("", ScriptedReply("", "", (_call(7, path="e.txt"),))),
    ("", ScriptedReply('It says \u201cna\u00efve\u201d: `{"a": [1]}`.\n\n1. **one**\n2. two', "")),
    ("Again, please.", ScriptedReply("Once more.", "Again.", (_call(8, path="a.txt"), _call(9, "list_files")))),
    ("", ScriptedReply("That is all.", "Done.")),
)
"""(the user's text; empty for a request that sends tool results, the model's answer)"""
SYSTEM: Json = {"role": "system", "content": "You are terse."}


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """An answer as a client reads it. White space around texts is left out."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Names, and arguments as JSON with sorted keys."""
    finish: str | None

    @classmethod
    def of_reply(cls, reply: ScriptedReply) -> ReceivedAnswer:
        calls = tuple((call.name, canonical(call.arguments)) for call in reply.calls)
        return cls(reply.text.strip(), reply.reasoning.strip(), calls, "tool_calls" if calls else "stop")

    @classmethod
    def of_choice(cls, choice: Json) -> ReceivedAnswer:
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return cls(
            (message.get("content") or "").strip(),
            (message.get("reasoning") or message.get("reasoning_content") or "").strip(),
            tuple((call["name"], canonical(call["arguments"])) for call in calls),
            choice["finish_reason"],
        )


def canonical(arguments: str) -> str:
    """Return JSON text with sorted keys; other text unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


class Agent:
    """The agent's side of a session over Chat Completions."""

    def __init__(self, options: Json, *, stream: bool, keeps_reasoning: bool) -> None:
        self._options = options
        self._keeps_reasoning = keeps_reasoning
        self.stream = stream
        self.messages: list[Json] = [SYSTEM]

    def body(self, said: str) -> Json:
        """Return the next request: what the user says, or the results of the last calls."""
        if said:
            self.messages.append({"role": "user", "content": said})
        body: Json = {"model": "m", "messages": self.messages, "tools": list(TOOLS), "stream": self.stream}
        return body | ({"chat_template_kwargs": self._options} if self._options else {})

    def add(self, choice: Json) -> None:
        """Add an answer to the history, and the results of its tool calls."""
        message = choice["message"]
        kept: Json = {"role": "assistant", "content": message.get("content")}
        if self._keeps_reasoning and message.get("reasoning_content"):
            kept["reasoning_content"] = message["reasoning_content"]
        calls = [self._again(call) for call in message.get("tool_calls") or ()]
        self.messages.append(kept | ({"tool_calls": calls} if calls else {}))
        for call in calls:
            result = f"result of {call['function']['name']}, number {len(self.messages)}"
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _again(self, call: Json) -> Json:
        """Return a tool call with its arguments parsed, and serialised in another form, as agents send them back."""
        try:
            value = json.loads(call["function"]["arguments"])
        except ValueError:
            return call
        style = STYLES["escaped" if self.stream else "reversed"]
        return {**call, "function": {**call["function"], "arguments": to_json(value, style)}}


async def ask(http: httpx.AsyncClient, body: Json) -> Json:
    """Send a chat request, and return the answer's only choice. Raises httpx.HTTPStatusError."""
    async with http.stream("POST", "/chat/completions", json=body) as answer:
        content = await answer.aread()
        if answer.is_error:
            raise httpx.HTTPStatusError(content.decode()[:300], request=answer.request, response=answer)
    if not body["stream"]:
        choice: Json = json.loads(content)["choices"][0]
        return choice
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n") if line.startswith("data: ")]
    return _joined([json.loads(line) for line in lines if line != "[DONE]"])


def _joined(chunks: Sequence[Json]) -> Json:
    """Join the chunks of a streamed answer."""
    message: Json = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for choice in (choice for chunk in chunks for choice in chunk.get("choices") or ()):
        delta = choice["delta"]
        finish = choice.get("finish_reason") or finish
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for part in delta.get("tool_calls") or ():
            calls = message["tool_calls"]
            if part["index"] == len(calls):
                calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call = calls[part["index"]]
            call["id"] += part.get("id") or ""
            function = part.get("function") or {}
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
    return {"message": message, "finish_reason": finish}


def planned_reply(messages: Sequence[Message]) -> ScriptedReply:
    """Return the planned answer to a conversation."""
    return PLAN[sum(message.role == "assistant" for message in messages)][1]
