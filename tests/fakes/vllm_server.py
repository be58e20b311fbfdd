"""A fake vLLM server with a script: ids, log-probabilities, streams, errors.

    async with FakeVllm() as fake:
        fake.script(Answer("Hello"), Fault(status=429, message="slow down"), Answer("bye", drop_after=3))
        ...  # the next three generations at fake.url get these; later ones get `fake.default`
        assert fake.bodies[0]["return_token_ids"] is True

Its tokens are the bytes of the text after five special ones, so that a test can write ids by hand: `ids("a") == [102]`.
Its chat template is ChatML. The distribution at each position is a fixed function of the token before it, so that the
log-probabilities of samples, prompts and alternatives agree.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from aiohttp import web

from tests.fakes.engine_server import FakeServer, Fault, Json, sse
from tests.fakes.vllm_parsers import derendered_chunk, parse_answer

EOT, START, END, CALL, CALLED = range(5)
NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
OFFSET = len(NAMES)
VOCABULARY = 256 + OFFSET


def ids(text: str) -> list[int]:
    """Return the tokens of a text without special tokens."""
    return [byte + OFFSET for byte in text.encode()]


def tokenized(text: str) -> list[int]:
    """Return the tokens of a text that may contain special tokens."""
    out: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, NAMES)) + ")", text):
        out += [NAMES.index(part)] if part in NAMES else ids(part)
    return out


def text_of(token_ids: list[int]) -> str:
    out = bytearray()
    for token in token_ids:
        out += NAMES[token].encode() if token < OFFSET else bytes([token - OFFSET])
    return out.decode(errors="replace")


@cache
def _logits(previous: int, temperature: float) -> tuple[list[float], float]:
    logits = [((previous * 7 + other * 13) % 29) / 4 / temperature for other in range(VOCABULARY)]
    return logits, math.log(sum(map(math.exp, logits)))


def logprob(previous: int, token: int, temperature: float = 1.0) -> float:
    """Return the log-probability of `token` after `previous`: softmax over `((previous * 7 + token * 13) % 29) / 4`."""
    logits, normaliser = _logits(previous, temperature)
    return logits[token] - normaliser


@dataclass
class Answer:
    """One generation. Text, reasoning and calls become tokens, unless `token_ids` is given."""

    text: str = "Hello."
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments)"""
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    per_chunk: int = 1
    """Tokens in each streamed chunk."""
    first_delay: float = 0.0
    delay: float = 0.0
    """Seconds before each chunk after the first."""
    drop_after: int | None = None
    """Cut the connection after this many chunks."""
    garbage_after: int | None = None
    """Send a chunk that is not JSON after this many chunks."""
    error_after: int | None = None
    """Send vLLM's error chunk after this many chunks."""
    versions: tuple[tuple[int, str], ...] = ()
    """(first position, weight version) of each run of tokens."""

    def tokens(self) -> list[int]:
        if self.token_ids is not None:
            return self.token_ids
        out = ids(f"<think>{self.reasoning}</think>") if self.reasoning else []
        out += ids(self.text)
        for name, arguments in self.tool_calls:
            out += [CALL, *ids(f'{{"name": "{name}", "arguments": {arguments}}}'), CALLED]
        return [*out, END]


@dataclass
class FakeVllm(FakeServer):
    """The quirks of the server:

    * no_ids, no_stream_ids, no_logprobs, no_tools, no_tokenize, no_score, no_version: it lacks this;
    * logits: it reports logits as log-probabilities;
    * no_choice: it ignores structured outputs;
    * own_grammar: with tools, it samples a call by a grammar of its own instead;
    * strict_level: with tools, a grammar also allows a call, as with --tool-strict-level;
    * free_with_tools: with tools, it replaces a given grammar by one that allows any text, as with Cohere's parser;
    * reasons_first: it reasons before a given text, under a grammar, as gpt-oss does;
    * other_form: calls are `name(arguments)` between the tags, for template and chat;
    * chat_library: chats are rendered otherwise than by `/tokenize`, as vLLM renders gpt-oss;
    * one_call: its template refuses an answer with two calls.

    `thinks`: it has a reasoning parser. `derenders`: as with --enable-scale-out. `reports_versions`: as vLLM 0.33.
    """

    model: str = "fake"
    default: Answer = field(default_factory=Answer)
    quirks: frozenset[str] = frozenset()
    processed: bool = False
    context_length: int = 4096
    version: str = "0.32.0"
    api_key: str | None = None
    weight_version: str | None = None
    thinks: bool = False
    derenders: bool = False
    reports_versions: bool = False
    metrics: str | None = None
    """The text of `/metrics`."""
    folder: str | None = None
    """The folder that the server names as its model's. `vllm_folder.py` writes such a folder."""
    peers: set[object] = field(default_factory=set, init=False)
    """Addresses of the connections that were used."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.peers.add(request.get_extra_info("peername"))
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/metrics" and self.metrics is not None:
            return web.Response(text=self.metrics)
        if request.path not in ("/v1/chat/completions", "/v1/completions"):
            status, answer = self.plain(request.path, body)
            return web.json_response(answer, status=status)
        self.bodies.append(body)
        planned = self.scripted.popleft() if self.scripted else None
        if isinstance(planned, Fault):
            if planned.status is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if planned.body is not None:
                return web.Response(status=planned.status, body=planned.body)
            return web.json_response(error(planned.message, planned.status, planned.param), status=planned.status)
        problem = self.refusal(request.path, body)
        if problem is not None:
            return web.json_response(problem, status=problem["error"]["code"])
        answer = planned or self.unplanned(body)
        try:
            await asyncio.sleep(answer.first_delay)
            if not body.get("stream"):
                return web.json_response(self.whole(request.path, body, answer))
            response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            for number, chunk in enumerate(self.chunks(request.path, body, answer)):
                if number and answer.delay:
                    await asyncio.sleep(answer.delay)
                if number == answer.drop_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if number == answer.garbage_after:
                    await response.write(b'data: {"choices": [\n\n')
                if number == answer.error_after:
                    await response.write(sse(error("EngineCore encountered an issue.", 500, None)))
                await response.write(sse(chunk))
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        return response

    # Everything below is pure: the benchmark's upstream serves it from a cheaper server.

    def plain(self, path: str, body: Json) -> tuple[int, Json]:
        """Return status and answer of a route that generates nothing."""
        if path == "/health":
            return 200, {}
        if path == "/version" and "no_version" not in self.quirks:
            return 200, {"version": self.version}
        if path == "/v1/models":
            card = {"id": self.model, "root": self.folder or self.model, "max_model_len": self.context_length}
            return 200, {"object": "list", "data": [card]}
        if path == "/tokenize" and "no_tokenize" not in self.quirks:
            if "one_call" in self.quirks and any(len(m.get("tool_calls") or ()) > 1 for m in body.get("messages", ())):
                return 400, error("This model only supports single tool-calls at once!", 400, None)
            tokens = self.render(body) if "messages" in body else tokenized(body["prompt"])
            return 200, {"count": len(tokens), "max_model_len": self.context_length, "tokens": tokens}
        if path == "/detokenize" and "no_tokenize" not in self.quirks:
            return 200, {"prompt": text_of(body["tokens"])}
        if path == "/v1/chat/completions/derender" and self.derenders:
            return 200, self.derender(body)
        if path == "/weight_info" and self.weight_version is not None:
            return 200, {"weight_version": self.weight_version}
        return 404, {"detail": "Not Found"}

    def render(self, body: Json) -> list[int]:
        out: list[int] = []
        if body.get("tools"):
            out += [START, *ids("system\n" + json.dumps(body["tools"])), END, *ids("\n")]
        for message in body["messages"]:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "\n".join(part.get("text", "") for part in content)
            for call in message.get("tool_calls") or ():
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                shown_text = json.dumps({"name": name, "arguments": arguments})
                if "other_form" in self.quirks:
                    shown_text = f"{name}({json.dumps(arguments)})"
                content += f"<tool_call>\n{shown_text}\n</tool_call>"
            out += [START, *ids(f"{message['role']}\n"), *tokenized(content), END, *ids("\n")]
        if body.get("continue_final_message"):
            return out[:-2]
        return out + ([START, *ids("assistant\n")] if body.get("add_generation_prompt", True) else [])

    def refusal(self, path: str, body: Json) -> Json | None:
        """Return the error that vLLM's own checks give; None if the request passes them."""
        if body.get("model") != self.model:
            return error(f"The model `{body.get('model')}` does not exist.", 404, "model")
        if "no_tools" in self.quirks and body.get("tools") and body.get("tool_choice", "auto") == "auto":
            return error('"auto" tool choice requires --enable-auto-tool-choice', 400, None)
        if (temperature := body.get("temperature") or 0) < 0:
            return error(f"temperature must be non-negative, got {temperature}.", 400, "temperature")
        length = len(self.prompt(path, body))
        if length >= self.context_length:
            text = f"This model's maximum context length is {self.context_length} tokens. However, your prompt "
            return error(text + f"contains at least {length} input tokens.", 400, "input_tokens")
        if (wanted := body.get("max_tokens") or 0) > self.context_length - length:
            text = (
                f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's maximum context length "
            )
            text += f"is {self.context_length} tokens and your request has {length} input tokens."
            return error(text, 400, "max_tokens")
        return None

    def prompt(self, path: str, body: Json) -> list[int]:
        if path == "/v1/chat/completions":
            return [*(ids("library") if "chat_library" in self.quirks else ()), *self.render(body)]
        prompt = body["prompt"]
        return ids(prompt) if isinstance(prompt, str) else list(prompt)

    def read(self, tokens: list[int], body: Json) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """Return (reasoning, text, calls) of sampled tokens, as the server parses them."""
        tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
        text = text_of([token for token in tokens if token != END])
        return parse_answer(text, tools=tools, thinks=self.thinks, other_form="other_form" in self.quirks)

    def unplanned(self, body: Json) -> Answer:
        """Return the answer to a request that no script covers."""
        return self.default

    def has_grammar(self, body: Json) -> bool:
        """Return whether an answer is sampled under the grammar of its request."""
        return bool(body.get("structured_outputs")) and not ("free_with_tools" in self.quirks and body.get("tools"))

    def held(self, body: Json, answer: Answer) -> Answer:
        """Return the answer under `structured_outputs`, which is exactly the requested text or sequence of tokens."""
        form = body.get("structured_outputs")
        if not self.has_grammar(body) or "no_choice" in self.quirks:
            return answer
        if "reasons_first" in self.quirks:
            return Answer("Hm.", token_ids=[*tokenized("Hm."), END])
        if "own_grammar" in self.quirks and body.get("tools"):
            tokens = [CALL, *ids('look({"path": "a"})'), CALLED, END]
        elif "choice" in form:
            tokens = [*tokenized(form["choice"][0]), END]
        else:
            tokens = [*map(int, re.findall(r"Token\((\d+)\)", form["grammar"])), END]
        reasoning, text, calls = self.read(tokens, body)
        return Answer(text, reasoning, calls, token_ids=tokens)

    def derender(self, body: Json) -> Json:
        """Return the parsed answer, or one step of its streamed parsing; the client carries the state."""
        if not body["stream"]:
            sampled = body["generate_response"]["choices"][0]
            reasoning, text, calls = self.read(sampled["token_ids"], body["chat_request"])
            tool_calls = [tool_call(place, *call) for place, call in enumerate(calls)]
            message = {"reasoning": reasoning, "content": text, "tool_calls": tool_calls}
            return {"choices": [{"index": 0, "message": message, "finish_reason": sampled["finish_reason"]}]}
        chunk = body["generate_chunk"]["choices"][0]
        old = (body["stream_state"] or {}).get("output_token_ids", [])
        new = [*old, *chunk["token_ids"]]
        before, now = (self.read(tokens, body["chat_request"]) for tokens in (old, new))
        if chunk["finish_reason"] is None:  # what may become a call is held back
            now = (now[0], now[1].partition("<")[0], now[2])
        before = (before[0], before[1].partition("<")[0], before[2])
        return {
            "chunk": derendered_chunk(before, now, chunk["finish_reason"]),
            "stream_state": {"output_token_ids": new},
        }

    def shown(self, path: str, body: Json, tokens: list[int]) -> str:
        """Return the raw text of tokens. Special tokens are included if the request or its tools need them, but END
        only with `ignore_eos`."""
        special = body.get("skip_special_tokens") is False
        if path == "/v1/chat/completions":
            special = bool(body.get("tools")) and body.get("tool_choice") != "none"
        ends = not body.get("ignore_eos")
        return text_of([token for token in tokens if token >= OFFSET or (special and not (ends and token == END))])

    def sampled(self, body: Json, answer: Answer, prompt: list[int]) -> tuple[list[int], list[float | None], str]:
        """Return ids, log-probabilities and the finish reason."""
        tokens = answer.tokens()
        forced = [int(token) for token, bias in (body.get("logit_bias") or {}).items() if bias >= 100]
        if forced and not body.get("structured_outputs"):
            tokens = forced[:1] if forced[0] == END and not body.get("ignore_eos") else forced[:1] * 1000
        chat = "messages" in body
        finish = answer.finish_reason or ("tool_calls" if answer.tool_calls and chat else "stop")
        limit = body.get("max_tokens", None if chat else 16)
        if limit is not None and len(tokens) > limit:
            tokens, finish = tokens[:limit], "length"
        values: list[float | None] | None = answer.logprobs
        if values is None:
            before = [*prompt, *tokens]
            temperature = (body.get("temperature") or 1.0) if self.processed else 1.0
            start = len(prompt)
            values = [logprob(before[start + i - 1], token, temperature) for i, token in enumerate(tokens)]
        return tokens, values, finish

    def whole(self, path: str, body: Json, answer: Answer) -> Json:
        """Return the answer that is not streamed."""
        prompt = self.prompt(path, body)
        answer = self.held(body, answer)
        tokens, values, finish = self.sampled(body, answer, prompt)
        chat = path == "/v1/chat/completions"
        choices = []
        for index in range(body.get("n", 1)):
            choice: Json = {"index": index, "finish_reason": finish, "stop_reason": None}
            choice["logprobs"] = self.logprobs(path, body, prompt, tokens, values)
            choice["token_ids"] = tokens if self._sends_ids(body) else None
            choice |= self._versions(body, answer, tokens)
            if chat:
                message = choice["message"] = {"role": "assistant", "content": answer.text}
                if finish == "length":
                    message["content"] = self.shown(path, body, tokens)
                elif answer.tool_calls:
                    message["tool_calls"] = [tool_call(i, *call) for i, call in enumerate(answer.tool_calls)]
                message["reasoning"] = answer.reasoning or None
            else:
                choice["text"] = self.shown(path, body, tokens)
                choice["prompt_token_ids"] = prompt if self._sends_ids(body) else None
                if body.get("prompt_logprobs") is not None and "no_score" not in self.quirks:
                    choice["prompt_logprobs"] = [None] + [
                        {str(b): {"logprob": logprob(a, b)}} for a, b in pairwise(prompt)
                    ]
            choices.append(choice)
        out: Json = {"id": "cmpl-1", "model": self.model, "choices": choices, "usage": usage(prompt, tokens)}
        if chat:
            out["prompt_token_ids"] = prompt if self._sends_ids(body) else None
        return out

    def chunks(self, path: str, body: Json, answer: Answer) -> Iterator[Json]:
        """Yield the chunks of a stream. Choices interleave, and tool calls are held back until they are complete."""
        prompt = self.prompt(path, body)
        answer = self.held(body, answer)
        tokens, values, finish = self.sampled(body, answer, prompt)
        chat = path == "/v1/chat/completions"
        sends_ids = self._sends_ids(body) and "no_stream_ids" not in self.quirks
        count = range(body.get("n", 1))
        if chat:
            for index in count:
                choice: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                yield {"choices": [choice]} | ({"prompt_token_ids": prompt} if sends_ids else {})
        step = answer.per_chunk
        shown_text = ""
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            last = start + step >= len(tokens)
            now = self.shown(path, body, tokens[: start + step]).rstrip("\ufffd")
            if chat and last and finish != "length":
                now = answer.text
            if not answer.text.startswith(now) and not (finish == "length" or not chat):
                now = shown_text  # calls follow the text and are held back
            for index in count:
                choice = {"index": index, "finish_reason": finish if last else None}
                before = [*prompt, *tokens[:start]]
                choice["logprobs"] = self.logprobs(path, body, before, part, values[start : start + step])
                choice |= {"token_ids": part} if sends_ids else {}
                choice |= self._versions(body, answer, tokens) if last else {}
                if chat:
                    delta = choice["delta"] = {"content": now[len(shown_text) :]} if now != shown_text else {}
                    if not start and answer.reasoning:
                        delta["reasoning"] = answer.reasoning
                    if last and finish != "length" and answer.tool_calls:
                        delta["tool_calls"] = [
                            {"index": i} | tool_call(i, *call) for i, call in enumerate(answer.tool_calls)
                        ]
                else:
                    choice["text"] = now[len(shown_text) :]
                    choice["prompt_token_ids"] = prompt if sends_ids and not start else None
                yield {"choices": [choice]}
            shown_text = now
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {"choices": [], "usage": usage(prompt, tokens)}

    def _versions(self, body: Json, answer: Answer, tokens: list[int]) -> Json:
        """Return the spans that vLLM 0.33 sends with the end of a choice."""
        if not (self.reports_versions and body.get("return_weight_versions")):
            return {}
        runs = [*(answer.versions or ((0, self.weight_version or "default"),)), (len(tokens), "")]
        spans = [{"version": version, "start": start, "end": end} for (start, version), (end, _) in pairwise(runs)]
        return {"weight_versions": spans}

    def _sends_ids(self, body: Json) -> bool:
        return bool(body.get("return_token_ids")) and "no_ids" not in self.quirks

    def logprobs(
        self, path: str, body: Json, before: list[int], tokens: list[int], values: list[float | None]
    ) -> Json | None:
        wanted = body.get("logprobs")
        if wanted is None or wanted is False or "no_logprobs" in self.quirks:
            return None
        named = body.get("return_tokens_as_token_ids")
        top = body.get("top_logprobs", 0) if path == "/v1/chat/completions" else wanted
        temperature = (body.get("temperature") or 1.0) if self.processed else 1.0
        shift = 50.0 if "logits" in self.quirks else 0.0

        def name(token: int) -> str:
            return f"token_id:{token}" if named else text_of([token])

        rows = []
        for position, (token, value) in enumerate(zip(tokens, values, strict=False)):
            others: list[tuple[int, float]] = []
            if top:
                previous = [*before, *tokens][len(before) + position - 1]
                every = [(other, logprob(previous, other, temperature)) for other in range(VOCABULARY)]
                if self.has_grammar(body) and "no_choice" not in self.quirks:
                    allowed = {token, *([CALL] if self.quirks & {"strict_level", "reasons_first"} else [])}
                    every = [(other, p if other in allowed else -9999.0) for other, p in every]
                every.sort(key=lambda entry: -entry[1])
                likely = [entry for entry in every[:top] if entry[0] != token]
                others = [(token, logprob(previous, token, temperature)), *likely][:top]
            shown = -9999.0 if value is None else value + shift
            rows.append((token, shown, [(other, p + shift) for other, p in others]))
        if path == "/v1/chat/completions":
            content = [
                {
                    "token": name(token),
                    "logprob": value,
                    "bytes": list(text_of([token]).encode()),
                    "top_logprobs": [{"token": name(o), "logprob": p, "bytes": []} for o, p in others],
                }
                for token, value, others in rows
            ]
            return {"content": content}
        return {
            "tokens": [name(token) for token, _, _ in rows],
            "token_logprobs": [value for _, value, _ in rows],
            "top_logprobs": [{name(o): p for o, p in others} for _, _, others in rows] if top else None,
            "text_offset": [0] * len(rows),
        }


def error(message: str, code: int, param: str | None) -> Json:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": code}}


def tool_call(index: int, name: str, arguments: str) -> Json:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def usage(prompt: list[int], tokens: list[int]) -> Json:
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(tokens),
        "total_tokens": len(prompt) + len(tokens),
        "prompt_tokens_details": {"cached_tokens": len(prompt) // 2},
    }
