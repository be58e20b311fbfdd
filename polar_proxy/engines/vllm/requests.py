"""Polar's requests as the JSON bodies of vLLM's routes, without the model's name. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan

import orjson

from polar_proxy.engines.base import enforced_format
from polar_proxy.engines.openai_stream import MISSING_BELOW
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Json, Message, Sampling, TextRequest, TokenIds

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
)


def chat_body(request: ChatRequest, *, stream: bool) -> Json:
    """Return the body for `/v1/chat/completions`.

    Its `response_format` is `enforced_format`: vLLM's grammar would constrain the whole answer and forbid tool calls.
    """
    body = _body(request.sampling, stream)
    body["messages"] = [_message(message) for message in request.messages]
    body["logprobs"] = True
    if request.sampling.top_logprobs:
        body["top_logprobs"] = request.sampling.top_logprobs
    if request.tools:
        body["tools"] = list(request.tools)
        if request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    if (form := enforced_format(request)) is not None:
        body["response_format"] = form
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    return body


def _message(message: Message) -> Json:
    """Return a message in the form that vLLM accepts.

    vLLM refuses a conversation in which the arguments of a call are not JSON, although a model wrote them. It accepts
    them as a JSON string, which templates print unchanged. Reasoning is sent under both of its names: the chat route
    accepts `reasoning_content` for `reasoning`, while `/tokenize` of the same server (0.32) drops it; older servers
    accept only the long name.
    """
    out = message.to_openai()
    if message.reasoning is not None:
        out["reasoning"] = message.reasoning
    for call in out.get("tool_calls", ()):
        function = call["function"]
        if not _is_json(function["arguments"]):
            function["arguments"] = orjson.dumps(function["arguments"]).decode()
    return out


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def text_body(request: TextRequest, *, stream: bool) -> Json:
    """Return the body for `/v1/completions` of a raw prompt."""
    body = _body(request.sampling, stream)
    body["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    body["logprobs"] = request.sampling.top_logprobs  # counts the alternatives; the sampled token is always included
    return body


def exact_body(
    request: ChatRequest, prompt: TokenIds, context_length: int, *, stream: bool, show_special: bool
) -> Json:
    """Return the body for `/v1/completions` that samples the answer to a chat from exactly these prompt ids.

    Without `max_tokens` a completion ends after 16 tokens, a chat at the end of the context: the body sets the limit of
    the chat. `show_special` keeps special tokens in the answer's text, except for the one at which it ends.
    """
    room = context_length - prompt.size
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {context_length} tokens and the prompt has {prompt.size}.",
            code="context_length_exceeded",
        )
    wanted = request.sampling.max_tokens
    sampling = replace(request.sampling, max_tokens=room if wanted is None else min(wanted, room))
    body = text_body(TextRequest(request.model, (), sampling), stream=stream)
    body["prompt"] = prompt.tolist()
    if show_special:
        body["skip_special_tokens"] = False
    return body


def render_body(request: ChatRequest, *, generation: bool = True) -> Json:
    """Return the body for `/tokenize` that renders a conversation; `generation` includes the tokens that open the
    answer."""
    body: Json = {
        "messages": [_message(message) for message in request.messages],
        "add_generation_prompt": generation,
    }
    if request.tools:
        body["tools"] = list(request.tools)
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    return body


def prompt_body(request: ChatRequest) -> Json:
    """Return the body of a chat that samples one token, whose answer carries the prompt's ids."""
    plain = replace(request, sampling=Sampling(max_tokens=1), response_format=None)
    return chat_body(plain, stream=False)


def score_body(token_ids: Sequence[int]) -> Json:
    """Return the body for `/v1/completions` that scores a prompt. vLLM generates at least one token."""
    return {
        "prompt": list(token_ids),
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "temperature": 0,
    }


def scores(token_ids: Sequence[int], answer: Json, name: str) -> list[float]:
    """Return the log-probabilities of `token_ids[1:]` from the answer to `score_body`; `name` is for error texts."""
    rows = answer["choices"][0].get("prompt_logprobs") if answer.get("choices") else None
    if not rows or len(rows) != len(token_ids):
        raise EngineError(f"{name} returned no log-probabilities for the {len(token_ids)} tokens of a prompt.")
    out: list[float] = []
    for token, row in zip(token_ids[1:], rows[1:], strict=True):
        entry = (row or {}).get(str(token))
        if entry is None:
            raise EngineError(f"{name} returned no log-probability for token {token} of a prompt.")
        out.append(entry["logprob"] if entry["logprob"] > MISSING_BELOW else nan)
    return out


def _body(sampling: Sampling, stream: bool) -> Json:
    body: Json = {"return_token_ids": True}
    for name in _SAMPLING:
        value = getattr(sampling, name)
        if value is not None:
            body[name] = value
    if sampling.top_logprobs:
        body["return_tokens_as_token_ids"] = True
    if sampling.n != 1:
        body["n"] = sampling.n
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = dict(sampling.logit_bias)
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body
