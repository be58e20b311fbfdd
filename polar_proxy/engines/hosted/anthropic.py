"""`anthropic`: Anthropic's Messages API. Source: https://docs.anthropic.com/en/api"""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import quote

import orjson

from polar_proxy.engines.hosted.anthropic_request import anthropic_body, anthropic_prompt
from polar_proxy.engines.hosted.base import CONTEXT_LENGTH, HostedDecoder, HostedEngine, hosted_info
from polar_proxy.engines.hosted.carried import passed_betas
from polar_proxy.engines.hosted.errors import stream_error
from polar_proxy.engines.openai_client import AnswerDecoder
from polar_proxy.engines.openai_stream import parse_json
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, ProviderTurn, SampleEvent, ToolDelta, Usage

ANTHROPIC_URL = "https://api.anthropic.com"
_VERSION = "2026-10-21"
_MAX_TOKENS = 8192
"""The `max_tokens` of a request if neither the client nor the API's description of the model gives a limit. The API
requires this field."""
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


class AnthropicEngine(HostedEngine):
    """A model of Anthropic's API: `async with AnthropicEngine(model="claude-...", api_key="...") as engine:`.

    Entering raises EngineError if the API cannot be reached, refuses the key, or does not serve the model.
    """

    provider: ClassVar[str] = "anthropic"

    def __init__(self, url: str = ANTHROPIC_URL, *, model: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key=api_key, auth=("x-api-key", ""), headers={"anthropic-version": _VERSION})
        self._model = model
        self._max_tokens = _MAX_TOKENS

    async def _connect(self) -> EngineInfo:
        response = await self.client.send("GET", f"/v1/models/{quote(self._model, safe='')}")
        card: Json = {}
        if response.status == 200:
            card = parse_json(await self.client.read(response), self.client.url)
        elif response.status in (405, 501):  # a proxy of the Messages API only
            await self.client.read(response)
        else:
            raise await self._connect_error(response)
        self._max_tokens = card.get("max_tokens") or _MAX_TOKENS
        length = card.get("max_input_tokens") or CONTEXT_LENGTH
        return hosted_info("anthropic", _VERSION, self._model, length, "signed_answers")

    def _encode(self, request: EngineRequest, stream: bool) -> tuple[str, Json]:
        if not isinstance(request, ChatRequest):
            raise RequestError(
                "Anthropic has no raw completions: send a chat request.", param="prompt", code="unsupported_parameter"
            )
        return "/v1/messages", anthropic_body(request, self.info.model, self._max_tokens, stream=stream)

    def _headers(self, request: EngineRequest) -> bytes:
        betas = passed_betas(request, self.provider)
        return b"anthropic-beta: %b\r\n" % ",".join(betas).encode("ascii") if betas else b""

    def _decoder(self, request: EngineRequest) -> AnswerDecoder:
        return MessageDecoder(self.client.name, self.info.model)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of prompt tokens as the provider counts them."""
        prompt = await self.client.thread.run(request.large, anthropic_prompt, request, self.info.model)
        answer = await self.client.json("POST", "/v1/messages/count_tokens", prompt)
        return int(answer["input_tokens"])


class MessageDecoder(HostedDecoder):
    """Turns a message, or the events of its stream, into `SampleEvent`s."""

    def __init__(self, name: str, model: str) -> None:
        """`name`: the server's name in error texts. `model`: the model that was requested."""
        super().__init__(name)
        self._model = model
        self._blocks: dict[int, Json] = {}
        """Content blocks by index, with the text so far."""
        self._inputs: dict[int, list[str]] = {}
        """The pieces of the arguments of each `tool_use` block, by the block's index."""
        self._usage: Json = {}
        self._stop: Json = {}
        self._ended = False

    def end(self) -> list[SampleEvent]:
        if not self._ended or self._stop.get("stop_reason") is None:
            raise EngineError(f"{self._name} broke off in the middle of its answer.")
        blocks = [self._finished_block(index) for index in sorted(self._blocks)]
        signed = any(block["type"] in ("thinking", "redacted_thinking") for block in blocks)
        reason = self._stop["stop_reason"]
        if reason not in _FINISH_REASONS:
            raise EngineError(f"{self._name} ended its answer for a reason that Polar does not know: {reason!r:.80}.")
        finish = SampleEvent(
            finish_reason=_FINISH_REASONS[reason],
            stop_sequence=self._stop.get("stop_sequence"),
            usage=anthropic_usage(self._usage, self._model),
            provider_turn=ProviderTurn("anthropic", tuple(blocks)) if signed else None,
        )
        return [finish]

    def events(self, chunk: Json) -> list[SampleEvent]:
        event = self._event(chunk)
        return [] if event is None else [event]

    def _event(self, chunk: Json) -> SampleEvent | None:
        match chunk["type"]:
            case "message":
                return self._whole(chunk)
            case "message_start":
                self._model = chunk["message"].get("model") or self._model
                self._count(chunk["message"].get("usage"))
            case "content_block_start":
                return self._begin(chunk["index"], chunk["content_block"])
            case "content_block_delta":
                return self._delta(chunk["index"], chunk["delta"])
            case "content_block_stop":
                return self._close(chunk["index"])
            case "message_delta":
                self._stop = chunk["delta"]
                self._count(chunk.get("usage"))
            case "message_stop":
                self._ended = True
            case "error":
                raise stream_error(chunk["error"], self._name)
        return None  # `ping`, and events that are added later

    def _whole(self, message: Json) -> SampleEvent:
        self._model = message.get("model") or self._model
        self._count(message.get("usage"))
        self._stop, self._ended = message, True
        deltas: list[ToolDelta] = []
        for index, block in enumerate(message["content"]):
            for event in (self._begin(index, block), self._close(index)):
                deltas += () if event is None else event.tool_calls
        blocks = message["content"]
        return SampleEvent(
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            tool_calls=tuple(deltas),
        )

    def _begin(self, index: int, block: Json) -> SampleEvent | None:
        self._blocks[index] = dict(block)
        match block["type"]:
            case "text":
                return SampleEvent(text=block["text"]) if block["text"] else None
            case "thinking":
                return SampleEvent(reasoning=block["thinking"]) if block["thinking"] else None
            case "tool_use":
                given = orjson.dumps(block["input"]).decode() if block.get("input") else ""
                self._inputs[index] = [given] if given else []
                delta = ToolDelta(len(self._inputs) - 1, block["id"], block["name"], given)
                return SampleEvent(tool_calls=(delta,))
            case "redacted_thinking":
                return None
        raise EngineError(
            f"{self._name} answered with a block of type {block['type']!r:.80}, which Polar cannot pass on to "
            "the agent."
        )

    def _delta(self, index: int, delta: Json) -> SampleEvent | None:
        block = self._blocks[index]
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
                return SampleEvent(text=delta["text"])
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
                return SampleEvent(reasoning=delta["thinking"])
            case "signature_delta":
                block["signature"] = block.get("signature", "") + delta["signature"]
            case "input_json_delta":
                self._inputs[index].append(delta["partial_json"])
                number = sorted(self._inputs).index(index)
                return SampleEvent(tool_calls=(ToolDelta(number, arguments=delta["partial_json"]),))
        return None  # citations, which no other dialect has

    def _close(self, index: int) -> SampleEvent | None:
        """Return an event with the arguments `{}` if a tool call ended without arguments, else None."""
        if index not in self._inputs or "".join(self._inputs[index]):
            return None
        self._inputs[index].append("{}")
        return SampleEvent(tool_calls=(ToolDelta(sorted(self._inputs).index(index), arguments="{}"),))

    def _finished_block(self, index: int) -> Json:
        block = self._blocks[index]
        if index not in self._inputs:
            return block
        arguments = "".join(self._inputs[index]) or "{}"
        try:
            return {**block, "input": orjson.loads(arguments)}
        except orjson.JSONDecodeError:  # cut by the token limit
            return block

    def _count(self, usage: Json | None) -> None:
        self._usage |= {key: value for key, value in (usage or {}).items() if value is not None}


def anthropic_usage(usage: Json, model: str) -> Usage | None:
    """Return the token counts; None if the provider did not report them.

    Tokens read from or written to the cache are added to Anthropic's `input_tokens`, which leaves them out.
    """
    if not isinstance(usage.get("input_tokens"), int) or not isinstance(usage.get("output_tokens"), int):
        return None
    cached, written = usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens")
    tier = "fast" if usage.get("speed") == "fast" else usage.get("service_tier")
    return Usage(
        input_tokens=usage["input_tokens"] + (cached or 0) + (written or 0),
        output_tokens=usage["output_tokens"],
        cached_tokens=cached,
        cache_write_tokens=written,
        cache_write_1h_tokens=(usage.get("cache_creation") or {}).get("ephemeral_1h_input_tokens"),
        reasoning_tokens=(usage.get("output_tokens_details") or {}).get("thinking_tokens"),
        model=model,
        service_tier=None if tier in (None, "standard") else str(tier),
    )
