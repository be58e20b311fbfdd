"""Google's response: GenerateContentResponse objects, alone, as server-sent events, or as items of a JSON array.

* Text is streamed as it arrives. A function call is sent whole, as soon as the next call has begun or the answer has
  ended.
* Reasoning is sent as a thought part if the client asked for thoughts. In any case, the signature of the next part that
  is not a thought holds the reasoning, too. The signature of the first tool call holds all reasoning so far, because
  the first call is where Google's own API puts a signature. In a stream, the first piece of a text has the text's
  signature, because Gemini CLI keeps only the text of all later pieces. Reasoning after the last part goes into the
  signature of an additional empty text part.
* `args` must be a JSON object. Other arguments (such as `[1]`, or JSON that is broken or cut short) reach the agent as
  the text `name(arguments)`, letter for letter, and never as an empty object; the signature restores the tool call when
  the text comes back. Empty arguments of a finished tool call mean `{}`.
* `thoughtsTokenCount` counts the tokens up to the end of the reasoning, `candidatesTokenCount` the tokens after it. If
  an engine does not show where the reasoning ends, `candidatesTokenCount` counts all tokens.
* An answer of the type `text/x.enum` is sampled as a JSON string, because engines can constrain JSON. It is sent in one
  piece, without the quotes.
* There are no safety ratings, so no `safetyRatings` and no `promptFeedback`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from polar_proxy.dialects.base import Answer, AnswerChoice, Encoder
from polar_proxy.dialects.google.contents import SignedReasoning, call_as_text, encode_signature
from polar_proxy.dialects.wire import is_json_object, sse
from polar_proxy.types import Json, SampleEvent, ToolCall

_FINISH_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}

_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
    529: "UNAVAILABLE",
}

_TYPE = "type.googleapis.com/google.rpc."


@dataclass(slots=True)
class _PartWriter:
    thoughts: bool
    reasoning: str = ""
    signed_length: int = 0
    """Number of characters at the beginning of `reasoning` that earlier signatures hold."""
    called: bool = False

    def thought(self, text: str) -> list[Json]:
        self.reasoning += text
        return [{"text": text, "thought": True}] if self.thoughts and text else []

    def text(self, text: str) -> list[Json]:
        return [self._sign({"text": text})] if text else []

    def call(self, call: ToolCall, *, cut: bool) -> list[Json]:
        """Return the `Part` object of a tool call, in a list. `cut`: the token limit ended the answer here, so the
        arguments may be incomplete."""
        unsent = None
        if is_json_object(call.arguments) or not (call.arguments.strip() or cut):
            part: Json = {"functionCall": {"name": call.name, "args": _args(call.arguments)}}
            if call.id:
                part["functionCall"]["id"] = call.id
        else:
            part, unsent = {"text": call_as_text(call)}, call
        first, self.called = not self.called, True
        return [self._sign(part, all_reasoning=first, call=unsent)]

    def calls(self, choice: AnswerChoice, start: int) -> list[Json]:
        """Return the `Part` objects of the tool calls from index `start` on."""
        parts: list[Json] = []
        for number, call in enumerate(choice.tool_calls[start:], start):
            last = number == len(choice.tool_calls) - 1
            parts += self.call(call, cut=last and choice.finish_reason == "length")
        return parts

    def rest(self) -> list[Json]:
        """If some of the reasoning is in no signature yet, return an empty text part whose signature holds it."""
        return [self._sign({"text": ""})] if len(self.reasoning) > self.signed_length else []

    def _sign(self, part: Json, *, all_reasoning: bool = False, call: ToolCall | None = None) -> Json:
        start = 0 if all_reasoning else self.signed_length
        if start < len(self.reasoning) or call is not None:
            part["thoughtSignature"] = encode_signature(SignedReasoning(start, self.reasoning[start:], call))
            self.signed_length = len(self.reasoning)
        return part


@dataclass(slots=True)
class _CandidateStream:
    parts: _PartWriter
    received: AnswerChoice = field(default_factory=AnswerChoice)
    """The candidate's tool calls; text and reasoning are not kept here."""
    calls_sent: int = 0
    pending: AnswerChoice = field(default_factory=AnswerChoice)
    """The tokens whose log-probabilities were not sent yet."""


@dataclass
class GoogleEncoder(Encoder):
    model: str
    sse: bool
    """True: stream server-sent events; False: stream a JSON array."""
    thoughts: bool
    logprobs: bool
    enum: bool
    """True if the answer is one value of an enumeration, sampled as a JSON string."""
    _started: bool = field(default=False, init=False)
    _streams: dict[int, _CandidateStream] = field(default_factory=dict, init=False)

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        stream = self._stream(event.index)
        if self.logprobs:
            tokens = SampleEvent(token_ids=event.token_ids, logprobs=event.logprobs, tokens=event.tokens, top=event.top)
            stream.pending.add(tokens)
        parts = stream.parts.thought(event.reasoning)
        if not self.enum:
            parts += stream.parts.text(event.text)
        if event.tool_calls:
            stream.received.add(SampleEvent(tool_calls=event.tool_calls))
            calls = stream.received.tool_calls
            # More arguments may arrive for the last call, and for an earlier one until its object is complete.
            while stream.calls_sent < len(calls) - 1 and is_json_object(calls[stream.calls_sent].arguments):
                parts += stream.parts.call(calls[stream.calls_sent], cut=False)
                stream.calls_sent += 1
        return self._write(self._response([self._streamed(event.index, parts, stream)])) if parts else b""

    def end(self, answers: list[Answer]) -> bytes:
        candidates = []
        for index, choice in answers[0].in_order:
            stream = self._stream(index)
            parts = stream.parts.text(self._text(choice)) if self.enum else []
            parts += stream.parts.calls(choice, stream.calls_sent) + stream.parts.rest()
            candidate = self._streamed(index, parts or [{"text": ""}], stream)
            candidates.append(self._finished(candidate, choice))
        last = self._write({**self._response(candidates), "usageMetadata": _usage(answers)})
        return last if self.sse else last + b"]"

    def respond(self, answers: list[Answer]) -> bytes:
        candidates = []
        for index, choice in answers[0].in_order:
            writer = _PartWriter(self.thoughts)
            parts = writer.thought("".join(choice.reasoning)) + writer.text(self._text(choice))
            parts += writer.calls(choice, 0) + writer.rest()
            candidate = self._candidate(index, parts or [{"text": ""}], choice)
            candidates.append(self._finished(candidate, choice))
        return orjson.dumps({**self._response(candidates), "usageMetadata": _usage(answers)})

    def _text(self, choice: AnswerChoice) -> str:
        text = "".join(choice.text)
        return _unquoted(text) if self.enum else text

    def fail(self, message: str, status: int) -> bytes:
        error = self._write(google_error(message, status))
        return error if self.sse else error + b"]"

    def _stream(self, index: int) -> _CandidateStream:
        found = self._streams.get(index)
        if found is None:
            found = self._streams[index] = _CandidateStream(_PartWriter(self.thoughts))
        return found

    def _write(self, response: Json) -> bytes:
        if self.sse:
            return sse(response)
        separator = b",\r\n" if self._started else b"["
        self._started = True
        return separator + orjson.dumps(response)

    def _response(self, candidates: list[Json]) -> Json:
        return {"candidates": candidates, "modelVersion": self.model, "responseId": self.call_id}

    def _streamed(self, index: int, parts: list[Json], stream: _CandidateStream) -> Json:
        tokens, stream.pending = stream.pending, AnswerChoice()
        return self._candidate(index, parts, tokens)

    def _candidate(self, index: int, parts: list[Json], tokens: AnswerChoice) -> Json:
        candidate: Json = {"content": {"role": "model", "parts": parts}, "index": index}
        if self.logprobs and tokens.tokens:
            candidate["logprobsResult"] = _logprobs_result(tokens)
        return candidate

    def _finished(self, candidate: Json, choice: AnswerChoice) -> Json:
        candidate["finishReason"] = _FINISH_REASONS.get(choice.finish_reason or "stop", "OTHER")
        if self.logprobs and choice.logprobs:
            candidate["avgLogprobs"] = sum(choice.logprobs) / len(choice.logprobs)
        return candidate


def _args(arguments: str) -> Any:
    """Return a call's arguments for JSON output: the model's own text, byte for byte, or {} for an empty text. If the
    text has line breaks, return the parsed value instead, because a line break would end an SSE event."""
    if not arguments.strip():
        return {}
    if "\n" in arguments or "\r" in arguments:
        return orjson.loads(arguments)
    return orjson.Fragment(arguments)


def _unquoted(text: str) -> str:
    """Return the string that `text` encodes in JSON. If `text` is not a JSON string (it may be cut short), return
    `text`."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, str) else text


def _logprobs_result(choice: AnswerChoice) -> Json:
    chosen = [
        _token(token, token_id, logprob)
        for token, token_id, logprob in zip(choice.tokens, choice.token_ids, choice.logprobs, strict=True)
    ]
    result: Json = {"chosenCandidates": chosen}
    if any(choice.top):
        result["topCandidates"] = [
            {"candidates": [_token(other.token, other.token_id, other.logprob) for other in row]} for row in choice.top
        ]
    return result


def _token(token: str, token_id: int, logprob: float) -> Json:
    return {"token": token, "tokenId": token_id, "logProbability": logprob}


def _usage(answers: list[Answer]) -> Json:
    prompt = sum(answer.prompt_tokens for answer in answers)
    sampled = sum(answer.completion_tokens for answer in answers)
    thoughts = sum(answer.reasoning_tokens for answer in answers)
    usage: Json = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": sampled - thoughts,
        "totalTokenCount": prompt + sampled,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": prompt}],
    }
    if thoughts:
        usage["thoughtsTokenCount"] = thoughts
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if cached:
        usage["cachedContentTokenCount"] = sum(cached)
    return usage


def google_error(message: str, status: int, param: str | None = None, retry_after: str | None = None) -> Json:
    """Return the body of an error, a google.rpc.Status. Source: https://cloud.google.com/apis/design/errors

    A BadRequest detail names the faulty field. 429 and 503 carry a RetryInfo, because Gemini CLI reads the delay there
    and not in the `retry-after` header.
    """
    error: Json = {
        "code": status,
        "message": message,
        "status": _STATUS.get(status) or ("INVALID_ARGUMENT" if status < 500 else "INTERNAL"),
    }
    if status == 401:
        error["details"] = [
            {"@type": _TYPE + "ErrorInfo", "reason": "API_KEY_INVALID", "domain": "googleapis.com", "metadata": {}}
        ]
    elif status in (429, 503):
        # The header may be a date; the delay is seconds.
        seconds = retry_after if retry_after is not None and retry_after.isdecimal() else "1"
        error["details"] = [{"@type": _TYPE + "RetryInfo", "retryDelay": f"{seconds}s"}]
    elif param is not None:
        violation = {"field": param, "description": message}
        error["details"] = [{"@type": _TYPE + "BadRequest", "fieldViolations": [violation]}]
    return {"error": error}
