"""What OpenAI's Chat Completions and Completions share: field checks, sampling fields, log-probability shapes, errors.

Source: https://platform.openai.com/docs/api-reference (chat, completions, errors).
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import orjson

from polar_proxy.dialects.base import Answer
from polar_proxy.errors import RequestError
from polar_proxy.types import Json, Sampling, TopLogprob

T = TypeVar("T")

_TOKEN_ID = re.compile("[0-9]{1,10}")

_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def take(body: Json, key: str, kind: type[T], *, low: float = -(2**63), high: float = 2**63 - 1) -> T | None:
    """body[key] if it is of this kind (JSON null counts as absent), within [low, high]; else a 400 naming the field."""
    value: Any = body.get(key)
    if value is None:
        return None
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise RequestError(
            f"Invalid type for '{key}': expected {_NAMES.get(kind, kind.__name__)}.",
            param=key,
            code="invalid_type",
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not low <= value <= high:  # NaN is not
            bounds = f"at least {low:g}" if value < low else f"at most {high:g}"
            raise RequestError(f"Invalid value for '{key}': it must be {bounds}.", param=key, code="invalid_value")
        if kind is float:
            value = float(value)
    return cast(T, value)


def required(body: Json, key: str, kind: type[T]) -> T:
    value = take(body, key, kind)
    if value is None:
        raise RequestError(f"Missing required parameter: '{key}'.", param=key, code="missing_required_parameter")
    return value


def parse_sampling(body: Json, *, max_tokens: int | None, logprobs: bool, top_logprobs: int) -> Sampling:
    """The sampling fields common to both routes, vLLM's extensions (top_k, min_p) included."""
    stop = body.get("stop")
    if stop is None:
        stops: tuple[str, ...] = ()
    elif isinstance(stop, str):
        stops = (stop,)
    elif isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        stops = tuple(stop)
    else:
        raise RequestError("Invalid type for 'stop': expected a string or an array of strings.", param="stop")
    bias = take(body, "logit_bias", dict)
    if bias is not None and not all(_is_bias(key, value) for key, value in bias.items()):
        raise RequestError(
            "Invalid 'logit_bias': expected token ids with numbers between -100 and 100.", param="logit_bias"
        )
    top_k = take(body, "top_k", int, low=-1, high=2**31 - 1)
    return Sampling(
        temperature=take(body, "temperature", float, low=0, high=2),
        top_p=take(body, "top_p", float, low=0, high=1),
        top_k=None if top_k is None or top_k <= 0 else top_k,
        min_p=take(body, "min_p", float, low=0, high=1),
        max_tokens=max_tokens,
        seed=take(body, "seed", int, low=-(2**63), high=2**63 - 1),
        stop=tuple(item for item in stops if item),
        n=take(body, "n", int, low=1, high=128) or 1,
        presence_penalty=take(body, "presence_penalty", float, low=-2, high=2),
        frequency_penalty=take(body, "frequency_penalty", float, low=-2, high=2),
        logit_bias=bias,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def _is_bias(key: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -100 <= value <= 100 and _TOKEN_ID.fullmatch(key) is not None


def stream_options(body: Json) -> bool:
    """Whether the stream shall end with a usage chunk."""
    options = take(body, "stream_options", dict) or {}
    return bool(options.get("include_usage"))


def usage(answers: list[Answer]) -> Json:
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


def chat_logprobs(tokens: list[str], logprobs: list[float], top: list[tuple[TopLogprob, ...]]) -> Json:
    """The `logprobs` object of a chat choice."""
    content = []
    for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        alternatives = top[position] if position < len(top) else ()
        content.append(
            {
                "token": token,
                "logprob": logprob,
                "bytes": list(token.encode()),
                "top_logprobs": [
                    {"token": other.token, "logprob": other.logprob, "bytes": list(other.token.encode())}
                    for other in alternatives
                ],
            }
        )
    return {"content": content, "refusal": None}


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(error: RequestError) -> bytes:
    return orjson.dumps(error_object(str(error), error.status, error.param, error.code))
