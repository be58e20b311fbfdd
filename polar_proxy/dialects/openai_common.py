"""Parts that OpenAI's routes share: sampling fields, an encoder base, log-probabilities and errors.

Source: https://platform.openai.com/docs/api-reference (chat, completions, errors).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from polar_proxy.dialects.base import Answer, AnswerChoice, Dialect, Encoder
from polar_proxy.dialects.fields import (
    Integer,
    Penalty,
    Probability,
    RepetitionPenalty,
    RequestFields,
    Temperature,
    TopK,
    invalid,
    invalid_type,
)
from polar_proxy.dialects.wire import sse
from polar_proxy.errors import RequestError
from polar_proxy.fast_fields import reader_of
from polar_proxy.types import Json, SampleEvent, Sampling

_TOKEN_ID = re.compile("[0-9]{1,10}")


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise invalid_type("stop", "a string or an array of strings")
    return tuple(item for item in stops if item)


def _biases(value: dict[str, Any]) -> dict[str, Any]:
    for key, bias in value.items():
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100 or _TOKEN_ID.fullmatch(key) is None:
            raise invalid("logit_bias", "expected token ids with numbers between -100 and 100")
    return value


class SamplingFields(RequestFields):
    """The sampling fields that the OpenAI routes share, vLLM's extensions (top_k, min_p,
    repetition_penalty) included.

    The names are those of `Sampling`.
    """

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    seed: Integer | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    n: Annotated[Integer, Field(ge=1, le=128)] = 1
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, Any], AfterValidator(_biases)] | None = None

    def sampling(self, *, max_tokens: int | None, logprobs: bool, top_logprobs: int) -> Sampling:
        return Sampling(**_read_shared(self), max_tokens=max_tokens, logprobs=logprobs, top_logprobs=top_logprobs)


_read_shared = reader_of(tuple(SamplingFields.model_fields))


class StreamFields(SamplingFields):
    model: str
    stream: bool = False
    stream_options: Json = Field(default_factory=dict)
    return_token_ids: Any = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise invalid("stream_options", "it is only allowed when 'stream' is true")
        return self

    def encoder(self, kind: type[OpenAIEncoder], *, logprobs: bool) -> Callable[..., OpenAIEncoder]:
        return partial(
            kind,
            model=self.model,
            stream_usage=bool(self.stream_options.get("include_usage")),
            logprobs=logprobs,
            token_ids=bool(self.return_token_ids),
            n=self.n,
        )


@dataclass
class OpenAIEncoder(Encoder):
    """Base of the encoders whose stream consists of chunks with `choices`."""

    id_prefix: ClassVar[str]
    response_object: ClassVar[str]
    chunk_object: ClassVar[str]
    empty_content: ClassVar[Json]
    """The field of a choice in a chunk that has no content: an empty `delta` or `text`."""
    null_usage: ClassVar[bool] = False
    """Whether chunks before the usage chunk have `usage: null`."""

    model: str
    stream_usage: bool
    """Whether the stream ends with a usage chunk."""
    logprobs: bool
    token_ids: bool
    n: int

    def end(self, answers: list[Answer]) -> bytes:
        out = b"".join(
            self._chunk([make_choice(index, self._last_content(index, choice), self._finish_reason(choice))])
            for index, _, choice in self._numbered(answers)
        )
        if self.stream_usage:
            out += self._chunk([], usage=_usage(answers))
        return out + b"data: [DONE]\n\n"

    def fail(self, message: str, status: int) -> bytes:
        return sse(error_object(message, status))

    def _last_content(self, index: int, choice: AnswerChoice) -> Json:
        """Return the content of the last chunk of choice number `index`."""
        return self.empty_content

    def _finish_reason(self, choice: AnswerChoice) -> str:
        return choice.finish_reason or "stop"

    def _numbered(self, answers: list[Answer]) -> list[tuple[int, Answer, AnswerChoice]]:
        """Return the choices of all engine requests with their index in the response."""
        return [
            (number * self.n + index, answer, choice)
            for number, answer in enumerate(answers)
            for index, choice in answer.in_order
        ]

    def _chunk(self, choices: list[Json], **fields: Any) -> bytes:
        chunk = self._object(self.chunk_object, choices)
        if self.null_usage and self.stream_usage:
            chunk["usage"] = None
        return sse(chunk | fields)

    def _response(self, choices: list[Json], answers: list[Answer], **fields: Any) -> bytes:
        body = {**self._object(self.response_object, choices), "usage": _usage(answers), **fields}
        return orjson.dumps(body)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id_prefix + self.call_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def choice_mode(choice: Any) -> str | None:
    """Return the mode of a `tool_choice`: the string "none", "auto" or "required"; for any other value, return None.

    The mode is the value itself or, as some clients send it, the `type` of an object, such as {"type": "auto"}.
    """
    mode = choice.get("type") if isinstance(choice, dict) else choice
    return mode if mode in ("none", "auto", "required") else None


def make_choice(index: int, content: Json, finish_reason: str | None = None) -> Json:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(answers: list[Answer]) -> Json:
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    out: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if reasoning := sum(answer.reasoning_tokens for answer in answers):
        out["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if cached:
        out["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    written = [answer.cache_write_tokens for answer in answers if answer.cache_write_tokens is not None]
    if written:
        out["prompt_tokens_details"] = {**out.get("prompt_tokens_details", {}), "cache_write_tokens": sum(written)}
    return out


def token_logprobs(sampled: SampleEvent | AnswerChoice) -> list[Json]:
    """Return tokens with their log-probabilities in the form of Chat Completions and Responses."""
    without = [()] * (len(sampled.tokens) - len(sampled.top))
    return [
        {**_token(token, logprob), "top_logprobs": [_token(other.token, other.logprob) for other in top]}
        for token, logprob, top in zip(sampled.tokens, sampled.logprobs, [*sampled.top, *without], strict=True)
    ]


def _token(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class OpenAIDialect(Dialect):
    def error_body(self, error: RequestError, request_id: str) -> bytes:
        return orjson.dumps(error_object(str(error), error.status, error.param, error.code))
