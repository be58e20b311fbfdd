"""Answers as GenerateContentResponse objects: alone, as server-sent events, or as the elements of a JSON array.

* Text goes out in pieces as it comes, a function call whole: when the next call has begun, or at the end.
* Reasoning is a thought part where the client asked for thoughts. In any case what the client has not yet got a
  signature for is signed on the next part that is not a thought, and the first call's signature holds all of it
  (where Google puts its own). In a stream the text's signature rides on its first piece: Gemini CLI glues later pieces
  to the first and drops whatever they carry but text. Reasoning behind the last part is signed on an empty text.
* `args` must be a JSON object. Arguments that are none (the model wrote `[1]`, or broken JSON, or was cut) reach the
  agent as the text `name(arguments)`, letter for letter, and never as an empty object; its signature restores the
  call when the text comes back. Empty arguments of a finished call mean none: `{}`.
* `candidatesTokenCount` counts all sampled tokens, thoughts included: which token belongs to a thought is not known.
* Nothing is rated for safety here, so there are no `safetyRatings` and no `promptFeedback`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_proxy.dialects.base import Answer, AnswerChoice, Encoder, sse
from polar_proxy.dialects.google.contents import call_as_text
from polar_proxy.dialects.google.errors import google_error
from polar_proxy.dialects.google.signature import SignedReasoning, pack
from polar_proxy.types import Json, SampleEvent, ToolCall, TopLogprob

_FINISH = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


def _args(arguments: str) -> Any:
    """The object as the model wrote it; a line break between its members would end the event, so that is rewritten."""
    if not arguments.strip():
        return {}
    if "\n" in arguments or "\r" in arguments:
        return orjson.loads(arguments)
    return orjson.Fragment(arguments)


@dataclass(slots=True)
class _PartWriter:
    """Makes the parts of one candidate, in order."""

    thoughts: bool
    reasoning: str = ""
    signed: int = 0
    """Characters of the reasoning that the client has a signature for."""
    called: bool = False

    def thought(self, text: str) -> list[Json]:
        self.reasoning += text
        return [{"text": text, "thought": True}] if self.thoughts and text else []

    def text(self, text: str) -> list[Json]:
        return [self._sign({"text": text})] if text else []

    def call(self, call: ToolCall, *, cut: bool) -> list[Json]:
        """`cut`: the answer ended for lack of tokens with this call, so that it may not be whole."""
        lost = None
        if _is_object(call.arguments) or not (call.arguments.strip() or cut):
            part: Json = {"functionCall": {"name": call.name, "args": _args(call.arguments)}}
            if call.id:
                part["functionCall"]["id"] = call.id
        else:
            part, lost = {"text": call_as_text(call)}, call
        first, self.called = not self.called, True
        return [self._sign(part, again=first, call=lost)]

    def rest(self) -> list[Json]:
        return [self._sign({"text": ""})] if len(self.reasoning) > self.signed else []

    def _sign(self, part: Json, *, again: bool = False, call: ToolCall | None = None) -> Json:
        at = 0 if again else self.signed
        if at < len(self.reasoning) or call is not None:
            part["thoughtSignature"] = pack(SignedReasoning(at, self.reasoning[at:], call))
            self.signed = len(self.reasoning)
        return part


@dataclass(slots=True)
class _CandidateStream:
    """One candidate of a stream: what has been heard, and how much of it was told."""

    parts: _PartWriter
    heard: Answer = field(default_factory=Answer)
    calls_told: int = 0
    tokens: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[TopLogprob, ...]] = field(default_factory=list)


class GoogleEncoder(Encoder):
    def __init__(self, options: Json, call_id: str, *, sse_stream: bool) -> None:
        self._model: str = options["model"]
        self._thoughts: bool = options["thoughts"]
        self._logprobs: bool = options["logprobs"]
        self._id = call_id
        self._sse = sse_stream
        self._begun = False
        self._streams: dict[int, _CandidateStream] = {}

    def _stream(self, index: int) -> _CandidateStream:
        found = self._streams.get(index)
        if found is None:
            found = self._streams[index] = _CandidateStream(_PartWriter(self._thoughts))
        return found

    def feed(self, part: int, event: SampleEvent) -> bytes:
        now = self._stream(event.index)
        if self._logprobs:
            now.tokens += event.tokens
            now.token_ids += event.token_ids
            now.logprobs += event.logprobs
            now.top += event.top
        parts = now.parts.thought(event.reasoning) + now.parts.text(event.text)
        if event.tool_calls:
            now.heard.add(SampleEvent(tool_calls=event.tool_calls))
            calls = now.heard.choices[0].tool_calls
            # The last call heard of may go on; one before it, too, until its object is closed.
            while now.calls_told < len(calls) - 1 and _is_object(calls[now.calls_told].arguments):
                parts += now.parts.call(calls[now.calls_told], cut=False)
                now.calls_told += 1
        return self._write(self._response([self._candidate(event.index, parts, now)])) if parts else b""

    def end(self, answers: list[Answer]) -> bytes:
        candidates = []
        for index, state in sorted(answers[0].choices.items()):
            now = self._stream(index)
            parts = _calls(now.parts, state, now.calls_told) + now.parts.rest()
            candidates.append(self._finished(self._candidate(index, parts or [{"text": ""}], now), state))
        last = self._write({**self._response(candidates), "usageMetadata": _usage(answers)})
        return last if self._sse else last + b"]"

    def respond(self, answers: list[Answer]) -> bytes:
        candidates = []
        for index, state in sorted(answers[0].choices.items()):
            made = _PartWriter(self._thoughts)
            parts = made.thought("".join(state.reasoning)) + made.text("".join(state.text))
            parts += _calls(made, state, 0) + made.rest()
            whole = _CandidateStream(
                made, tokens=state.tokens, token_ids=state.token_ids, logprobs=state.logprobs, top=state.top
            )
            candidates.append(self._finished(self._candidate(index, parts or [{"text": ""}], whole), state))
        return orjson.dumps({**self._response(candidates), "usageMetadata": _usage(answers)})

    def fail(self, message: str, status: int) -> bytes:
        error = self._write(google_error(message, status))
        return error if self._sse else error + b"]"

    def _write(self, response: Json) -> bytes:
        if self._sse:
            return sse(response)
        mark = b",\r\n" if self._begun else b"["
        self._begun = True
        return mark + orjson.dumps(response)

    def _response(self, candidates: list[Json]) -> Json:
        return {"candidates": candidates, "modelVersion": self._model, "responseId": self._id}

    def _candidate(self, index: int, parts: list[Json], now: _CandidateStream) -> Json:
        candidate: Json = {"content": {"role": "model", "parts": parts}, "index": index}
        if self._logprobs and now.tokens:
            candidate["logprobsResult"] = _logprobs(now)
            now.tokens, now.token_ids, now.logprobs, now.top = [], [], [], []
        return candidate

    def _finished(self, candidate: Json, state: AnswerChoice) -> Json:
        candidate["finishReason"] = _FINISH.get(state.finish_reason or "stop", "OTHER")
        if self._logprobs and state.logprobs:
            candidate["avgLogprobs"] = sum(state.logprobs) / len(state.logprobs)
        return candidate


def _calls(parts: _PartWriter, state: AnswerChoice, told: int) -> list[Json]:
    """The calls from number `told` on."""
    out: list[Json] = []
    for number, call in enumerate(state.tool_calls[told:], told):
        out += parts.call(call, cut=state.finish_reason == "length" and number == len(state.tool_calls) - 1)
    return out


def _logprobs(now: _CandidateStream) -> Json:
    chosen = [
        {"token": token, "tokenId": token_id, "logProbability": logprob}
        for token, token_id, logprob in zip(now.tokens, now.token_ids, now.logprobs, strict=True)
    ]
    result: Json = {"chosenCandidates": chosen}
    if any(now.top):
        result["topCandidates"] = [
            {
                "candidates": [
                    {"token": other.token, "tokenId": other.token_id, "logProbability": other.logprob} for other in row
                ]
            }
            for row in now.top
        ]
    return result


def _usage(answers: list[Answer]) -> Json:
    prompt = sum(answer.prompt_tokens for answer in answers)
    sampled = sum(answer.completion_tokens for answer in answers)
    usage: Json = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled,
        "totalTokenCount": prompt + sampled,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": prompt}],
    }
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if cached:
        usage["cachedContentTokenCount"] = sum(cached)
    return usage
