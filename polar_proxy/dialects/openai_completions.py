"""OpenAI Completions (raw prompts). Source: https://platform.openai.com/docs/api-reference/completions

If a request has a list of prompts, each prompt becomes a call of its own. As the API defines it, choice i of prompt p
has the index p * n + i, where n is the number of choices per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from pydantic import Field

from polar_proxy.dialects.base import Answer, AnswerChoice, ParsedRequest
from polar_proxy.dialects.fields import Integer, invalid, other_fields, unsupported
from polar_proxy.dialects.openai_common import OpenAIDialect, OpenAIEncoder, StreamFields, make_choice
from polar_proxy.dialects.wire import storable_params, to_json
from polar_proxy.types import ClientOptions, Json, SampleEvent, TextRequest

_MAX_PROMPTS = 128


class CompletionsFields(StreamFields):
    prompt: Any
    max_tokens: Annotated[Integer, Field(ge=0)] = 16
    best_of: Annotated[Integer, Field(ge=1)] = 1
    logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None


class OpenAICompletions(OpenAIDialect):
    name = "openai_completions"

    def parse(self, body: Json, previous: ParsedRequest | None = None) -> ParsedRequest:
        fields = CompletionsFields.read(body)
        prompts = _parse_prompts(fields.prompt)
        for key in ("suffix", "echo"):
            if body.get(key):
                raise unsupported(key)
        if fields.best_of > fields.n:
            raise unsupported("best_of", "it must not be greater than 'n'")
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
            encoder=fields.encoder(CompletionsEncoder, logprobs=fields.logprobs is not None),
        )

    def message_fields(self, stored: list[Json]) -> Json:
        (prompt,) = stored
        return {"prompt": prompt}

    def client_options(self, params: Json) -> ClientOptions:
        return ClientOptions(self.name, fields=other_fields(params, CompletionsFields))


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


@dataclass
class CompletionsEncoder(OpenAIEncoder):
    id_prefix = "cmpl-"
    response_object = chunk_object = "text_completion"
    empty_content: ClassVar = {"text": ""}

    _offsets: dict[int, int] = field(default_factory=dict, init=False)
    """Number of characters written so far, by choice index."""

    def feed(self, request_index: int, event: SampleEvent) -> bytes:
        wants_tokens = event.token_ids and (self.logprobs or self.token_ids)
        if not event.text and not wants_tokens:
            return b""
        index = request_index * self.n + event.index
        choice = make_choice(index, {"text": event.text})
        if self.logprobs and event.token_ids:
            offset = self._offsets.get(index, 0)
            choice["logprobs"] = _logprobs_object(event, offset)
            self._offsets[index] = offset + sum(map(len, event.tokens))
        if self.token_ids:
            choice["token_ids"] = event.token_ids
            if event.prompt_ids is not None:
                choice["prompt_token_ids"] = event.prompt_ids
        return self._chunk([choice])

    def respond(self, answers: list[Answer]) -> bytes:
        choices = []
        for index, answer, state in self._numbered(answers):
            choice = make_choice(index, {"text": "".join(state.text)}, state.finish_reason or "stop")
            if self.logprobs:
                choice["logprobs"] = _logprobs_object(state, 0)
            if self.token_ids:
                choice["token_ids"] = state.token_ids
                choice["prompt_token_ids"] = answer.prompt_ids
            choices.append(choice)
        return self._response(choices, answers)


def _logprobs_object(sampled: SampleEvent | AnswerChoice, offset: int) -> Json:
    """Return the log-probabilities of a run of tokens. The text of the run begins at character `offset` of the
    answer."""
    ends = accumulate(map(len, sampled.tokens), initial=offset)
    top = [{other.token: other.logprob for other in row} for row in sampled.top]
    return {
        "tokens": sampled.tokens,
        "token_logprobs": sampled.logprobs,
        "top_logprobs": top or None,
        "text_offset": list(ends)[:-1],
    }
