"""The routes of a llama-server as methods, and Polar's requests as the bodies of `/completion`.

Every sampling setting is sent, so that none of the server's own defaults (min_p 0.05, top_k 40, ...) has an effect.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from math import exp, log, nan
from typing import Any, ClassVar

from polar_proxy.engines.base import GREEDY_BELOW, uses_tools
from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK
from polar_proxy.engines.openai_client import OpenAIClient, server_message
from polar_proxy.engines.openai_stream import SseDecoder, api_error
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Json, Sampling, TopLogprob

COMPLETION = "/completion"
_SEEDS = 2**32 - 1
"""Seeds are sent modulo this number, because llama-server takes the seed 2**32 - 1 as a request for a random seed."""
_FORCED = 1e4
"""The logit bias by which a token is forced to be sampled."""
_EVERY_TOKEN = 1 << 20
_LARGE_PROMPT = 1 << 14
"""Requests with more prompt tokens than this are encoded in a thread."""
_ONE_TOKEN: Json = {"n_predict": 1, "samplers": ["top_k"], "top_k": 1, "return_tokens": True, "cache_prompt": True}
_COUNTED_IN_PROMPT = ("presence_penalty", "frequency_penalty")


class Vocabulary:
    """A model's tokens and the bytes of their texts. Control tokens have no text and are left out."""

    def __init__(self, rows: Sequence[Json]) -> None:
        """`rows`: a whole next-token distribution as llama-server reports it, one row for each token."""
        self.size = len(rows)
        self.token_bytes = {row["id"]: bytes(row["bytes"]) for row in rows if row["bytes"]}
        """The bytes of each token's text, which may be an incomplete UTF-8 character."""
        self._by_text: dict[bytes, list[int]] = {}
        for token_id, data in self.token_bytes.items():
            self._by_text.setdefault(data, []).append(token_id)

    def spellings(self, text: bytes, count: int) -> list[list[int]]:
        """Return all sequences of `count` token ids whose texts, put together, are `text`."""
        if count == 0:
            return [] if text else [[]]
        return [
            [token, *rest]
            for size in range(1, len(text) + 1)
            for token in self._by_text.get(text[:size], ())
            for rest in self.spellings(text[size:], count - 1)
        ]


class LlamaCppClient(OpenAIClient):
    """A client of one llama-server. Each request opens a new connection, because the server closes a connection without
    notice after a stream."""

    missing_field_hint: ClassVar[str] = " Is it a llama-server?"

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key, keep_alive=False)

    async def apply_template(self, request: ChatRequest, *, generation: bool = True) -> str:
        """Return the conversation as the server's template renders it. Raises RequestError if the template refuses."""
        return str(self.field(await self.json("POST", "/apply-template", _conversation(request, generation)), "prompt"))

    async def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Return the ids of a text; with `add_special` also the token that begins every sequence, if there is one."""
        body = {"content": text, "add_special": add_special, "parse_special": True}
        return list(self.field(await self.json("POST", "/tokenize", body), "tokens"))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self.field(await self.json("POST", "/detokenize", {"tokens": list(token_ids)}), "content"))

    async def forced(self, prompt: Sequence[int], token: int, **more: Any) -> Json:
        """Make the server sample `token` after `prompt`, by a logit bias. Return the server's response.

        The bias does not change the reported log-probabilities, which are those of the model at temperature 1.
        """
        body = {"prompt": list(prompt), "logit_bias": [[token, _FORCED]], "n_probs": 1, **_ONE_TOKEN, **more}
        answer = await self.json("POST", COMPLETION, body)
        if self.field(answer, "tokens") != [token]:
            raise EngineError(f"{self.name} did not sample the token {token}, although a bias forced it.")
        return dict(answer)

    async def next_tokens(self, prompt: Sequence[int], end: int, slot: int = -1) -> list[Json]:
        """Return the distribution of the token after `prompt` at temperature 1: one row for each token of the
        vocabulary.

        The server reports a distribution only for a position at which it samples. It is therefore forced to sample
        `end`, an end-of-turn token.
        """
        answer = await self.forced(prompt, end, n_probs=_EVERY_TOKEN, id_slot=slot)
        return list(self.field(answer, "completion_probabilities")[0]["top_logprobs"])

    async def chunks(self, body: Json) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a streamed answer. Closing the iterator makes the server stop generating.

        Raises EngineError if the answer is not complete.
        """
        response = await self.post(COMPLETION, body, large=len(body["prompt"]) > _LARGE_PROMPT)
        lines = SseDecoder(self.url)
        try:
            while data := await self._read_some(response):
                for chunk in lines.feed(data):
                    if "error" in chunk:
                        raise api_error(chunk, 500, self.name)
                    yield chunk
                    if chunk["stop"]:
                        return
        finally:
            response.close()
        raise EngineError(f"{self.name} broke off in the middle of its answer.")


def sampled_logprob(rows: Sequence[Json], token: int, sampling: Sampling) -> float:
    """Return the log-probability of `token` under the settings `sampling`. `rows`: the distribution at temperature 1.

    At temperature 0, return the log-probability at temperature 1. At any other temperature, return NaN if a setting
    other than the temperature changes the distribution.
    """
    own = next((float(row["logprob"]) for row in rows if row["id"] == token), nan)
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    if temperature < GREEDY_BELOW or temperature == 1.0:
        return own if temperature < 1.0 or _is_plain(sampling) else nan
    if not _is_plain(sampling):
        return nan
    return own / temperature - log(sum(exp(row["logprob"] / temperature) for row in rows))


def _is_plain(sampling: Sampling) -> bool:
    """Return whether no setting other than the temperature changes the model's own distribution."""
    return not (
        sampling.logit_bias
        or (sampling.top_p or 1.0) < 1.0
        or (sampling.top_k or 0) > 0
        or sampling.min_p
        or (sampling.repetition_penalty or 1.0) != 1.0
    )


def sampling_body(sampling: Sampling, seed: int, context: int, room: int) -> Json:
    """Return the sampling fields of `/completion`. The samplers are applied in the order of vLLM and of the local
    engine: penalties, temperature, min_p, top_k, top_p. The answer has at most `room` tokens.

    The answer's log-probabilities are those after all samplers (`post_sampling_probs`). At temperature 0 only one token
    is left after them, so log-probabilities at temperature 1 are requested instead. Raises RequestError for an invalid
    setting, and for presence and frequency penalties, because llama.cpp counts the prompt's tokens in them.
    """
    for name in _COUNTED_IN_PROMPT:
        if getattr(sampling, name):
            text = (
                f"llama.cpp counts the prompt's tokens in {name}, but in this API only those of the answer count: "
                "leave it out."
            )
            raise RequestError(text, param=name)
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    if temperature < 0 or (sampling.max_tokens is not None and sampling.max_tokens < 1):
        name = "temperature" if temperature < 0 else "max_tokens"
        raise RequestError(f"{name} must be {'0 or more' if temperature < 0 else 'at least 1'}.", param=name)
    greedy = temperature < GREEDY_BELOW
    repetition = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
    cuts = ["top_k"] if greedy else ["temperature", "min_p", "top_k", "top_p"]
    return {
        "samplers": [*(["penalties"] if repetition != 1.0 else []), *cuts],
        "temperature": temperature,
        "min_p": sampling.min_p or 0.0,
        "top_k": 1 if greedy else max(sampling.top_k or 0, 0),
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "repeat_penalty": repetition,
        "repeat_last_n": context if repetition != 1.0 else 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "min_keep": 0,
        "logit_bias": [[int(key), float(bias)] for key, bias in (sampling.logit_bias or {}).items()],
        "seed": seed % _SEEDS,
        "n_predict": room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        "n_probs": max(sampling.top_logprobs, 1),
        "post_sampling_probs": not greedy,
        "ignore_eos": False,
        "n_indent": 0,
        "t_max_predict_ms": 0,
    }


def stream_fields(prompt: Sequence[int]) -> Json:
    """Return the fields of a request for a streamed answer to the prompt ids `prompt`.

    They make the server keep the tags of reasoning and tool calls in the answer's text.
    """
    tags = [THINK, END_THINK, CALL, END_CALL]
    fields = {"stream": True, "return_tokens": True, "cache_prompt": True, "preserved_tokens": tags}
    return {"prompt": list(prompt), **fields}


def _conversation(request: ChatRequest, generation: bool) -> Json:
    body: Json = {"messages": [server_message(message) for message in request.messages]}
    if uses_tools(request):
        body["tools"] = list(request.tools)
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    return {**body, "add_generation_prompt": generation}


@dataclass(frozen=True, slots=True)
class StreamedToken:
    """A token of a streamed answer."""

    token_id: int
    logprob: float
    """NaN if the server did not report it."""
    text: str = ""
    top: tuple[TopLogprob, ...] = ()


def streamed_token(chunk: Json, count: int, name: str) -> StreamedToken | None:
    """Return the token of a chunk, with up to `count` alternatives; None if the chunk has no token.

    Raises EngineError if the chunk names two different ids for the token. `name`: the server's name in the error.
    """
    if not chunk.get("tokens"):
        return None
    (token_id,) = chunk["tokens"]
    entries = chunk.get("completion_probabilities") or ()
    if not entries:
        return StreamedToken(token_id, nan)
    (entry,) = entries
    if entry["id"] != token_id:
        raise EngineError(f"{name} sent two ids for one token, {token_id} and {entry['id']}.")
    rows = entry.get("top_logprobs") or entry.get("top_probs") or ()
    top = tuple(TopLogprob(row["id"], row["token"], _logprob(row)) for row in rows[:count])
    return StreamedToken(token_id, _logprob(entry), entry["token"], top)


def _logprob(entry: Json) -> float:
    if "logprob" in entry:
        return float(entry["logprob"])
    return log(entry["prob"]) if entry["prob"] > 0 else nan
