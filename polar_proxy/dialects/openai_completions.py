"""OpenAI Completions (raw prompts). Source: https://platform.openai.com/docs/api-reference/completions

A list of prompts is a list of calls: choice `index` runs over prompts first, then over `n`, as the API defines it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from polar_proxy.dialects.base import Answer, AnswerChoice, Dialect, Encoder, ParsedRequest, sse, to_json
from polar_proxy.dialects.openai_common import (
    error_body,
    error_object,
    parse_sampling,
    required,
    stream_options,
    take,
    usage,
)
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, SampleEvent, TextRequest, TopLogprob

_MAX_PROMPTS = 128


class OpenAICompletions(Dialect):
    name = "openai_completions"

    def parse(self, body: Json) -> ParsedRequest:
        model = required(body, "model", str)
        if "prompt" not in body:
            raise RequestError(
                "Missing required parameter: 'prompt'.", param="prompt", code="missing_required_parameter"
            )
        prompts = _parse_prompts(body["prompt"])
        for key in ("suffix", "echo"):
            if body.get(key):
                raise RequestError(f"'{key}' is not supported here.", param=key, code="unsupported_parameter")
        if (take(body, "best_of", int, low=1) or 1) > (take(body, "n", int, low=1) or 1):
            raise RequestError(
                "'best_of' above 'n' is not supported here.", param="best_of", code="unsupported_parameter"
            )
        top = take(body, "logprobs", int, low=0, high=20)
        max_tokens = take(body, "max_tokens", int, low=0)
        sampling = parse_sampling(
            body,
            # The API's own default is 16, unlike chat's; 0 cannot be sampled.
            max_tokens=16 if max_tokens is None else max(1, max_tokens),
            logprobs=top is not None,
            top_logprobs=top or 0,
        )
        params = {key: value for key, value in body.items() if key != "prompt"}
        to_json(params, "body")
        return ParsedRequest(
            requests=tuple(TextRequest(model, prompt, sampling) for prompt in prompts),
            stream=bool(take(body, "stream", bool)),
            messages=tuple((to_json(prompt, "prompt"),) for prompt in prompts),
            tools=None,
            params=params,
            options={
                "model": model,
                "usage": stream_options(body),
                "logprobs": top is not None,
                "token_ids": bool(body.get("return_token_ids")),
                "n": sampling.n,
            },
        )

    def body(self, messages: Sequence[bytes], tools: bytes | None, params: Json) -> Json:
        (prompt,) = messages
        return {**params, "prompt": orjson.loads(prompt)}

    def encoder(self, parsed: ParsedRequest, call_id: str, created: int) -> Encoder:
        return CompletionsEncoder(parsed.options, call_id, created)

    def error(self, error: RequestError) -> bytes:
        return error_body(error)


def _parse_prompts(value: Any) -> list[str | tuple[int, ...]]:
    if isinstance(value, str):
        return [value]
    if (isinstance(value, list) and value and len(value) <= _MAX_PROMPTS) or _is_ids(value):
        if _is_ids(value):
            return [tuple(value)]
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(_is_ids(item) for item in value):
            return [tuple(item) for item in value]
    raise RequestError(
        f"Invalid 'prompt': expected a string, an array of token ids, or an array of at most {_MAX_PROMPTS} of these.",
        param="prompt",
        code="invalid_type",
    )


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in value)
    )


class CompletionsEncoder(Encoder):
    def __init__(self, options: Json, call_id: str, created: int) -> None:
        self._model: str = options["model"]
        self._usage: bool = options["usage"]
        self._logprobs: bool = options["logprobs"]
        self._token_ids: bool = options["token_ids"]
        self._n: int = options["n"]
        self._id = "cmpl-" + call_id
        self._created = created
        self._offsets: dict[int, int] = {}

    def _body(self, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def feed(self, part: int, event: SampleEvent) -> bytes:
        wants_tokens = event.token_ids and (self._logprobs or self._token_ids)
        if not event.text and not wants_tokens:
            return b""
        index = part * self._n + event.index
        choice: Json = {"index": index, "text": event.text, "logprobs": None, "finish_reason": None}
        if self._logprobs and event.token_ids:
            offset = self._offsets.get(index, 0)
            choice["logprobs"] = _text_logprobs(event.tokens, event.logprobs, event.top, offset)
            self._offsets[index] = offset + sum(map(len, event.tokens))
        if self._token_ids:
            choice["token_ids"] = event.token_ids
            if event.prompt_ids is not None:
                choice["prompt_token_ids"] = event.prompt_ids
        return sse(self._body([choice]))

    def _states(self, answers: list[Answer]) -> list[tuple[int, Answer, AnswerChoice]]:
        return [
            (part * self._n + index, answer, state)
            for part, answer in enumerate(answers)
            for index, state in sorted(answer.choices.items())
        ]

    def end(self, answers: list[Answer]) -> bytes:
        out = b"".join(
            sse(
                self._body(
                    [
                        {
                            "index": index,
                            "text": "",
                            "logprobs": None,
                            "finish_reason": state.finish_reason or "stop",
                        }
                    ]
                )
            )
            for index, _, state in self._states(answers)
        )
        if self._usage:
            out += sse({**self._body([]), "usage": usage(answers)})
        return out + b"data: [DONE]\n\n"

    def respond(self, answers: list[Answer]) -> bytes:
        choices = []
        for index, answer, state in self._states(answers):
            choice: Json = {
                "index": index,
                "text": "".join(state.text),
                "logprobs": _text_logprobs(tuple(state.tokens), tuple(state.logprobs), tuple(state.top), 0)
                if self._logprobs
                else None,
                "finish_reason": state.finish_reason or "stop",
            }
            if self._token_ids:
                choice["token_ids"] = state.token_ids
                choice["prompt_token_ids"] = answer.prompt_ids
            choices.append(choice)
        return orjson.dumps({**self._body(choices), "usage": usage(answers)})

    def fail(self, message: str, status: int) -> bytes:
        return sse(error_object(message, status))


def _text_logprobs(
    tokens: tuple[str, ...],
    logprobs: tuple[float, ...],
    top: tuple[tuple[TopLogprob, ...], ...],
    offset: int,
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
