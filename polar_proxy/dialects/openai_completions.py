"""OpenAI Completions (raw prompts). Source: https://platform.openai.com/docs/api-reference/completions

Each prompt of a list is a call. The index of a choice counts through the prompts first, then through `n`, as the API
defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import Field

from polar_proxy.dialects.answer import Answer
from polar_proxy.dialects.base import Dialect, Encoder, ParsedRequest
from polar_proxy.dialects.fields import Integer, invalid, unsupported
from polar_proxy.dialects.openai_common import OpenAIEncoder, StreamFields, error_body
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, SampleEvent, TextRequest, TopLogprob

_MAX_PROMPTS = 128


class CompletionsFields(StreamFields):
    """The fields of a Completions body."""

    prompt: Any
    max_tokens: Annotated[Integer, Field(ge=0)] = 16
    best_of: Annotated[Integer, Field(ge=1)] = 1
    logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None


class OpenAICompletions(Dialect):
    name = "openai_completions"

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        fields = CompletionsFields.read(body)
        prompts = _parse_prompts(fields.prompt)
        for key in ("suffix", "echo"):
            if body.get(key):
                raise unsupported(key)
        if fields.best_of > fields.n:
            raise RequestError(
                "'best_of' above 'n' is not supported here.", param="best_of", code="unsupported_parameter"
            )
        sampling = fields.sampling(
            max_tokens=max(1, fields.max_tokens),  # the API allows 0, which cannot be sampled
            logprobs=fields.logprobs is not None,
            top_logprobs=fields.logprobs or 0,
        )
        return ParsedRequest(
            requests=tuple(TextRequest(fields.model, prompt, sampling) for prompt in prompts),
            stream=fields.stream,
            messages=tuple((to_json(prompt, "prompt"),) for prompt in prompts),
            tools=None,
            params=storable_params(body, "prompt"),
            options={
                "model": fields.model,
                "usage": fields.stream_usage,
                "logprobs": fields.logprobs is not None,
                "token_ids": bool(body.get("return_token_ids")),
                "n": fields.n,
            },
        )

    def rebuild_body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        (prompt,) = messages
        return {**params, "prompt": orjson.loads(prompt)}

    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder:
        return CompletionsEncoder(parsed.options, call_id, created)

    def error_body(self, error: RequestError) -> bytes:
        return error_body(error)


def _parse_prompts(value: Any) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        return [value]
    if _is_ids(value):
        return [tuple(value)]
    if isinstance(value, list) and 0 < len(value) <= _MAX_PROMPTS:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(_is_ids(item) for item in value):
            return [tuple(item) for item in value]
    expected = f"a string, an array of token ids, or an array of at most {_MAX_PROMPTS} of these"
    raise invalid("prompt", f"expected {expected}", code="invalid_type")


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in value)
    )


class CompletionsEncoder(OpenAIEncoder):
    """Encodes text completions and their chunks."""

    id_prefix = "cmpl-"
    response_object = chunk_object = "text_completion"

    def __init__(self, options: Json, call_id: str, created: int) -> None:
        super().__init__(options, call_id, created)
        self._offsets: dict[int, int] = {}
        """Characters written so far, by choice index."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        wants_tokens = event.token_ids and (self._logprobs or self._token_ids)
        if not event.text and not wants_tokens:
            return b""
        index = request_index * self._n + event.index
        choice = _choice(index, event.text)
        if self._logprobs and event.token_ids:
            offset = self._offsets.get(index, 0)
            choice["logprobs"] = _logprobs_object(event.tokens, event.logprobs, event.top, offset)
            self._offsets[index] = offset + sum(map(len, event.tokens))
        if self._token_ids:
            choice["token_ids"] = event.token_ids
            if event.prompt_ids is not None:
                choice["prompt_token_ids"] = event.prompt_ids
        return self._chunk([choice])

    def respond(self, answers: list[Answer]) -> bytes:
        choices = []
        for index, answer, state in self._numbered(answers):
            choice = _choice(index, "".join(state.text), state.finish_reason or "stop")
            if self._logprobs:
                choice["logprobs"] = _logprobs_object(state.tokens, state.logprobs, state.top, 0)
            if self._token_ids:
                choice["token_ids"] = state.token_ids
                choice["prompt_token_ids"] = answer.prompt_ids
            choices.append(choice)
        return self._response(choices, answers)

    def _last_choice(self, index: int, finish_reason: str) -> Json:
        return _choice(index, "", finish_reason)


def _choice(index: int, text: str, finish_reason: str | None = None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _logprobs_object(
    tokens: Sequence[str], logprobs: Sequence[float], top: Sequence[tuple[TopLogprob, ...]], offset: int
) -> Json:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": [{other.token: other.logprob for other in row} for row in top] if top else None,
        "text_offset": offsets,
    }
