"""A fake llama-server: ids, log-probabilities, streams that leave out tokens within a character.

    async with FakeLlama() as fake:
        fake.script("Hello.", Fault(status=500))
        ...  # the next two generations at fake.url get these; later ones are sampled from its distribution

It has the tokens and the chat template of `FakeVllm`. Its distribution is a fixed function of the previous token, and
bytes beyond ASCII are rare in it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count

from aiohttp import web

from tests.fakes.engine_server import FakeServer, Fault, Json, sse
from tests.fakes.vllm_folder import TEMPLATE
from tests.fakes.vllm_server import END, EOT, OFFSET, VOCABULARY, FakeVllm, text_of, tokenized

STOPS = (END, EOT)


@cache
def raw_logprobs(previous: int) -> tuple[float, ...]:
    """Return the log-probability of each token after `previous` at temperature 1."""
    logits = [
        ((previous * 7 + token * 13) % 29) / 4 - (12 if token >= 128 + OFFSET else 0) for token in range(VOCABULARY)
    ]
    total = math.log(sum(map(math.exp, logits)))
    return tuple(value - total for value in logits)


def sampled_logprobs(previous: int, body: Json) -> dict[int, float]:
    """Return the log-probabilities of the tokens that the request's samplers leave, the most likely token first."""
    bias = dict(body.get("logit_bias") or ())
    values = {token: value + bias.get(token, 0.0) for token, value in enumerate(raw_logprobs(previous))}
    for sampler in body["samplers"]:
        ordered = sorted(values.items(), key=lambda item: -item[1])
        if sampler == "temperature":
            ordered = [(token, value / body["temperature"]) for token, value in ordered]
        elif sampler == "top_k" and body["top_k"]:
            ordered = ordered[: body["top_k"]]
        elif sampler == "min_p" and body["min_p"]:
            ordered = [item for item in ordered if item[1] >= ordered[0][1] + math.log(body["min_p"])]
        highest = ordered[0][1]
        total = highest + math.log(sum(math.exp(value - highest) for _, value in ordered))
        values = {token: value - total for token, value in ordered}
        if sampler == "top_p" and body["top_p"] < 1:
            kept, mass = {}, 0.0
            for token, value in values.items():
                if mass < body["top_p"]:
                    kept[token] = value - math.log(body["top_p"])
                mass += math.exp(value)
            values = kept
    return values


def data_of(token: int) -> bytes:
    """Return the bytes of a token's text. Control tokens have none, except the tokens of tool calls, which are
    user-defined."""
    return bytes([token - OFFSET]) if token >= OFFSET else text_of([token]).encode() if token > END else b""


def is_cut(data: bytes) -> bool:
    """Return whether bytes end within a character, as `validate_utf8` of llama.cpp decides it."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        need = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 0
        if need > back:
            return True
    return False


@dataclass
class FakeLlama(FakeServer):
    """`quirks`: any of no_ids, no_probs, no_settings (a request's samplers are ignored), raw_only
    (`post_sampling_probs` is ignored), other_form, ollama, loading, chat_differs (the chat route adds a token), two_ids
    (the entry with a token's log-probability has another id)."""

    quirks: frozenset[str] = frozenset()
    context_length: int = 4096
    delay: float = 0.0
    """Seconds before each token."""

    def __post_init__(self) -> None:
        self._template = FakeVllm(quirks=self.quirks)
        self._planned: list[int] = []
        """Token ids of the latest scripted answer, after those of its prompt."""
        self._answered = 0
        """Length of the prompt in `_planned`, in tokens."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        if request.path == "/completion":
            return await self._completion(request, body)
        answer = self.plain(request.path, body)
        return web.json_response(answer or {"error": "not found"}, status=200 if answer is not None else 404)

    def plain(self, path: str, body: Json) -> Json | None:
        """Return the answer of a route that samples nothing; None if there is no such route."""
        if "ollama" in self.quirks:
            return {"version": "0.9.0"} if path == "/api/version" else None
        if path == "/health":
            return {"status": "ok"}
        if path == "/props":
            settings = {"n_ctx": self.context_length, "params": {"min_p": 0.05, "top_k": 40}}
            texts = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "", "build_info": "b1-fake"}
            return {"default_generation_settings": settings, "total_slots": 4, "model_ftype": "all F32", **texts}
        if path == "/v1/models":
            return {"data": [{"id": "fake.gguf"}]}
        if path == "/apply-template":
            return {"prompt": text_of(self._template.render(body))}
        if path == "/tokenize":
            return {"tokens": tokenized(body["content"])}
        if path == "/detokenize":
            return {"content": text_of(body["tokens"])}
        if path == "/v1/chat/completions":
            return {"usage": {"prompt_tokens": len(self._template.render(body)) + ("chat_differs" in self.quirks)}}
        return None

    async def _completion(self, request: web.Request, body: Json) -> web.StreamResponse:
        planned: str | list[int] | Fault | None = None
        if body.get("stream"):
            self.bodies.append(body)
            if self.scripted and not self._resumes(body["prompt"]):
                planned = self.scripted.popleft()
        if isinstance(planned, Fault):
            error = {"code": planned.status, "message": planned.message, "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=planned.status or 500)
        if planned is not None:
            tokens = [*tokenized(planned), END] if isinstance(planned, str) else planned
            self._planned, self._answered = [*body["prompt"], *tokens], len(body["prompt"])
        tokens = list(body["prompt"])
        chunks = self.chunks(body, tokens, self._planned)
        if not body.get("stream"):
            *chunks, last = chunks
            entries = [entry for chunk in chunks for entry in chunk.get("completion_probabilities", ())]
            probabilities = {"completion_probabilities": entries} if entries else {}
            return web.json_response({**last, "tokens": tokens[len(body["prompt"]) :], **probabilities})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for chunk in chunks:
                await asyncio.sleep(self.delay)
                await response.write(sse(chunk))
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        assert request.transport is not None
        request.transport.close()  # as llama-server does, without a header that says so
        return response

    def _resumes(self, prompt: list[int]) -> bool:
        """Return whether a prompt ends within the latest scripted answer."""
        return self._answered < len(prompt) < len(self._planned) and self._planned[: len(prompt)] == prompt

    def chunks(self, body: Json, before: list[int], planned: list[int]) -> Iterator[Json]:
        """Yield the chunks of an answer, of which the last one ends it, and append its tokens to those of the prompt.

        Tokens that end within a character have no chunk, and no log-probability.
        """
        data, sent = b"", 0
        draw = random.Random(body.get("seed", 0))
        common = {"index": 0, "id_slot": 1, "tokens_evaluated": len(before)}
        for number in count(1):
            token = self._next(before, planned, body, draw)
            entry = self._entry(before, token, body)
            before.append(token)
            data += data_of(token)
            if not is_cut(data):
                text = data[sent:].decode(errors="replace")
                sent = len(data)
                ids_ = {} if "no_ids" in self.quirks else {"tokens": [token]}
                probabilities = {} if "no_probs" in self.quirks else {"completion_probabilities": [entry]}
                entry |= {"token": text, "bytes": list(text.encode())}  # not only the token's own
                entry |= {"id": token + 1} if "two_ids" in self.quirks else {}
                chunk = {"content": text, "tokens": [], "stop": False, "tokens_predicted": number, **common}
                yield chunk | ids_ | probabilities
            stop = "eos" if token in STOPS else "limit" if number >= body["n_predict"] else None
            if stop is not None:
                settings = {name: body.get(name) for name in ("mirostat", "n_probs", "post_sampling_probs")}
                settings["samplers"] = ["top_k"] if "no_settings" in self.quirks else body["samplers"]
                last = {"content": "", "tokens": [], "stop": True, "tokens_predicted": number, "stop_type": stop}
                more = {"stopping_word": "", "timings": {"cache_n": 0}, "generation_settings": settings}
                yield last | more | common
                return

    def _next(self, before: list[int], planned: list[int], body: Json, draw: random.Random) -> int:
        forced = [token for token, bias in body.get("logit_bias") or () if bias >= 100]
        if not forced and body.get("stream") and len(planned) > len(before) and planned[: len(before)] == before:
            return planned[len(before)]
        values = sampled_logprobs(before[-1], body)
        return draw.choices(list(values), [math.exp(value) for value in values.values()])[0]

    def _entry(self, before: list[int], token: int, body: Json) -> Json:
        post = body.get("post_sampling_probs") and "raw_only" not in self.quirks
        raw = dict(enumerate(raw_logprobs(before[-1])))
        values = sampled_logprobs(before[-1], body) if post else raw
        ordered = sorted(values, key=lambda other: -values[other])[: body["n_probs"]]

        def row(other: int) -> Json:
            value = values.get(other, -math.inf)
            shown = {"prob": math.exp(value)} if post else {"logprob": value}
            return {
                "id": other,
                "token": data_of(other).decode(errors="ignore"),
                "bytes": list(data_of(other)),
                **shown,
            }

        return {**row(token), "top_probs" if post else "top_logprobs": [row(other) for other in ordered]}
