"""Parts that OpenAI's routes share: sampling fields, an encoder base, log-probabilities and errors.

Source: https://platform.openai.com/docs/api-reference (chat, completions, errors).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BeforeValidator, Field

from polar_proxy.dialects.answer import Answer, AnswerChoice
from polar_proxy.dialects.base import Encoder
from polar_proxy.dialects.fields import Integer, Penalty, Probability, RequestFields, Temperature, TopK, invalid_type
from polar_proxy.dialects.wire import sse
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, Sampling, TopLogprob

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
            raise RequestError(
                "Invalid 'logit_bias': expected token ids with numbers between -100 and 100.", param="logit_bias"
            )
    return value


class SamplingFields(RequestFields):
    """The sampling fields that the OpenAI routes share, vLLM's extensions (top_k, min_p) included.

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
    logit_bias: Annotated[dict[str, Any], AfterValidator(_biases)] | None = None

    def sampling(self, *, max_tokens: int | None, logprobs: bool, top_logprobs: int) -> Sampling:
        shared: Json = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return Sampling(**shared, max_tokens=max_tokens, logprobs=logprobs, top_logprobs=top_logprobs)


class StreamFields(SamplingFields):
    """The fields that Chat Completions and Completions share."""

    model: str
    stream: bool = False
    stream_options: Json = Field(default_factory=dict)

    @property
    def stream_usage(self) -> bool:
        """True if the stream ends with a usage chunk."""
        return bool(self.stream_options.get("include_usage"))


class OpenAIEncoder(Encoder):
    """The common part of the encoders of Chat Completions and Completions."""

    id_prefix: str
    response_object: str
    chunk_object: str
    null_usage = False
    """True if all chunks have the field `usage`, null before the last one, when the client asks for usage."""

    def __init__(self, options: Json, call_id: str, created: int) -> None:
        self._model: str = options["model"]
        self._stream_usage: bool = options["usage"]
        self._null_usage = self.null_usage and self._stream_usage
        self._logprobs: bool = options["logprobs"]
        self._token_ids: bool = options["token_ids"]
        self._n: int = options["n"]
        self._id = self.id_prefix + call_id
        self._created = created

    @abstractmethod
    def _last_choice(self, index: int, finish_reason: str) -> Json:
        """Return the entry of `choices` in the last chunk of a choice."""

    def end(self, answers: list[Answer]) -> bytes:
        out = b"".join(
            self._chunk([self._last_choice(index, choice.finish_reason or "stop")])
            for index, _, choice in self._numbered(answers)
        )
        if self._stream_usage:
            out += self._chunk([], usage=_usage(answers))
        return out + b"data: [DONE]\n\n"

    def fail(self, message: str, status: int) -> bytes:
        return sse(error_object(message, status))

    def _numbered(self, answers: list[Answer]) -> list[tuple[int, Answer, AnswerChoice]]:
        """Return the choices of all engine requests with their index in the response."""
        return [
            (number * self._n + index, answer, choice)
            for number, answer in enumerate(answers)
            for index, choice in answer.in_order
        ]

    def _chunk(self, choices: list[Json], **fields: Any) -> bytes:
        chunk = self._object(self.chunk_object, choices)
        if self._null_usage:
            chunk["usage"] = None
        if fields:
            chunk.update(fields)
        return sse(chunk)

    def _response(self, choices: list[Json], answers: list[Answer], **fields: Any) -> bytes:
        body = {**self._object(self.response_object, choices), "usage": _usage(answers), **fields}
        return orjson.dumps(body)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _usage(answers: list[Answer]) -> Json:
    prompt = sum(answer.prompt_tokens for answer in answers)
    completion = sum(answer.completion_tokens for answer in answers)
    out: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    if cached:
        out["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return out


def token_logprobs(
    tokens: Sequence[str], logprobs: Sequence[float], top: Sequence[tuple[TopLogprob, ...]]
) -> list[Json]:
    """Return tokens with their log-probabilities in the form of Chat Completions and Responses."""
    return [
        {
            "token": token,
            "logprob": logprob,
            "bytes": list(token.encode()),
            "top_logprobs": [
                {"token": other.token, "logprob": other.logprob, "bytes": list(other.token.encode())}
                for other in (top[position] if position < len(top) else ())
            ],
        }
        for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True))
    ]


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: RequestError) -> bytes:
    return orjson.dumps(error_object(str(error), error.status, error.param, error.code))
