"""Polar's requests as vLLM's JSON, and vLLM's answers, streamed or in one piece, as `SampleEvent`s. Pure data.

Invariant: of each choice, all `token_ids` that the server sent come out, once and in order, each with the
log-probability that the server reported for it. What the server does not say is said to be unknown, never made up:

* log-probability `nan`: no evidence for this token. vLLM says -9999.0 for a token whose log-probability it does not
  have or has clamped, and a chunk whose ids and log-probabilities differ in number cannot be aligned.
* token id -1: a log-probability came without its id.

Such a call is answered as any other (the agent is not to blame) and must not be trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import nan
from typing import Any

import orjson

from polar_proxy.engines.base import enforced_format
from polar_proxy.engines.openai_http import api_error
from polar_proxy.errors import EngineError
from polar_proxy.types import ChatRequest, Json, Message, SampleEvent, Sampling, TextRequest, ToolDelta, TopLogprob

MISSING_BELOW = -9000.0
"""vLLM floors at -9999.0; no float32 softmax over real logits comes near."""
UNKNOWN_ID = -1

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


def chat_body(model: str, request: ChatRequest, *, stream: bool) -> Json:
    """The body for `/v1/chat/completions`. Its `response_format` is `enforced_format`: vLLM's grammar would hold the
    whole answer to it and forbid the calls of offered tools."""
    body = _body(model, request.sampling, stream)
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
    """vLLM refuses a conversation in which the arguments of a call are no JSON, though a model wrote them. As a JSON
    string they pass, and templates write a string as it is."""
    out = message.to_openai()
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


def text_body(model: str, request: TextRequest, *, stream: bool) -> Json:
    """The body for `/v1/completions`; `logprobs` counts the alternatives there, the sampled token always comes."""
    body = _body(model, request.sampling, stream)
    body["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    body["logprobs"] = request.sampling.top_logprobs
    return body


def render_body(model: str, request: ChatRequest) -> Json:
    """The body for `/tokenize` that renders the prompt of this conversation."""
    body: Json = {
        "model": model,
        "messages": [_message(message) for message in request.messages],
        "add_generation_prompt": True,
    }
    if request.tools:
        body["tools"] = list(request.tools)
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    return body


def prompt_body(model: str, request: ChatRequest) -> Json:
    """The body for a chat of one token, made for the prompt ids that come with its answer."""
    plain = replace(request, sampling=Sampling(max_tokens=1), response_format=None)
    return chat_body(model, plain, stream=False)


def score_body(model: str, token_ids: Sequence[int]) -> Json:
    """The body for `/v1/completions` that scores a prompt; vLLM generates at least one token."""
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "prompt_logprobs": 0,
        "temperature": 0,
    }


def scores(token_ids: Sequence[int], answer: Json, who: str) -> list[float]:
    """The log-probabilities of `token_ids[1:]` out of the answer to `score_body`."""
    rows = answer["choices"][0].get("prompt_logprobs") if answer.get("choices") else None
    if not rows or len(rows) != len(token_ids):
        raise EngineError(f"{who} returned no log-probabilities for the {len(token_ids)} tokens of a prompt.")
    out: list[float] = []
    for token, row in zip(token_ids[1:], rows[1:], strict=True):
        entry = (row or {}).get(str(token))
        if entry is None:
            raise EngineError(f"{who} returned no log-probability for token {token} of a prompt.")
        out.append(entry["logprob"] if entry["logprob"] > MISSING_BELOW else nan)
    return out


def _body(model: str, sampling: Sampling, stream: bool) -> Json:
    body: Json = {"model": model, "return_token_ids": True}
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


class _Pending:
    """What has come for one choice and has not gone out yet."""

    __slots__ = ("finish", "ids", "logprobs", "reasoning", "stage", "stop", "text", "tokens", "tools", "top")

    def __init__(self) -> None:
        self.stage = 0
        self.text = ""
        self.reasoning = ""
        self.tools: list[ToolDelta] = []
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.tokens: list[str] = []
        self.top: list[tuple[TopLogprob, ...]] = []
        self.finish: str | None = None
        self.stop: str | None = None


class AnswerParser:
    """Collects the chunks of one answer (or the one object of a non-streamed answer) into events.

    `feed` merges all chunks that came with one read of the socket into one event per choice: a fast engine and a busy
    gateway thus meet in larger steps, an idle gateway passes on each token as it comes.
    """

    def __init__(self, sampling: Sampling, who: str, *, expect_ids: bool = True) -> None:
        """`who` names the server in errors. `expect_ids` is off for servers that are known to send none."""
        self._who = who
        self._expect_ids = expect_ids
        self._texts = sampling.logprobs or bool(sampling.top_logprobs)
        self._tops = bool(sampling.top_logprobs)
        self._open = set(range(sampling.n))
        self._prompt: list[int] | None = None
        self._started = False
        self._held: dict[int, _Pending] = {}
        self._cached: int | None = None

    def feed(self, chunks: Iterable[Json]) -> list[SampleEvent]:
        """The events which these chunks complete. Raises EngineError or RequestError for an error chunk."""
        out: list[SampleEvent] = []
        held = self._held
        plain = not self._texts
        for chunk in chunks:
            choices = chunk.get("choices")
            if self._prompt is None and not self._started:
                self._find_prompt(chunk, choices or ())
            if (usage := chunk.get("usage")) and (details := usage.get("prompt_tokens_details")):
                self._cached = details.get("cached_tokens")
            if not choices:
                if "error" in chunk:
                    raise self._error(chunk)
                continue
            for choice in choices:
                index = choice["index"]
                pending = held.get(index)
                if pending is None:
                    pending = held[index] = _Pending()
                if delta := choice.get("delta") or choice.get("message"):
                    pending = self._delta(index, pending, delta, out)
                elif text := choice.get("text"):
                    pending.text += text
                ids = choice.get("token_ids")
                logprobs = choice.get("logprobs")
                if plain and ids and logprobs and len(ids) == len(entries := logprobs.get("content") or []) == 1:
                    # Most chunks of most streams: one token. The same as below, at a third of the time.
                    pending.ids.append(ids[0])
                    pending.logprobs.append(_real(entries[0]["logprob"]))
                elif ids or logprobs:
                    self._evidence(pending, ids or (), logprobs)
                if finish := choice.get("finish_reason"):
                    pending.finish = finish
                    stop = choice.get("stop_reason")  # a stop string, or the id of a stop token
                    pending.stop = stop if isinstance(stop, str) else None
                    self._open.discard(index)
        # The very last event waits for the end of the answer, because the usage chunk stands behind it.
        for index in [index for index, pending in held.items() if self._open or pending.finish is None]:
            self._emit(index, held.pop(index), out)
        return out

    def end(self) -> list[SampleEvent]:
        """The last event of each choice. Raises EngineError when the answer is not complete."""
        if self._open:
            raise EngineError(f"{self._who} broke off in the middle of its answer.")
        out: list[SampleEvent] = []
        for index in sorted(self._held):
            self._emit(index, self._held[index], out, last=True)
        self._held = {}
        return out

    def _error(self, chunk: Json) -> Exception:
        error = chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        # A request is at fault only if it was refused before anything was generated.
        status = code if isinstance(code, int) and not (self._started and code < 500) else 500
        return api_error(chunk, status, self._who)

    def _find_prompt(self, chunk: Json, choices: Sequence[Json]) -> None:
        """Chat answers tell the prompt's ids at the top, completions in each choice."""
        found = chunk.get("prompt_token_ids") or next((c["prompt_token_ids"] for c in choices if _has_prompt(c)), None)
        if found is not None:
            self._prompt = found

    def _delta(self, index: int, pending: _Pending, delta: Json, out: list[SampleEvent]) -> _Pending:
        """Adds text. An event is read as reasoning, then text, then tool calls; another order opens a new event."""
        if len(delta) == 1 and pending.stage == 1 and (text := delta.get("content")):
            pending.text += text  # most chunks of most streams
            return pending
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            pending = self._stage(0, index, pending, out)
            pending.reasoning += reasoning
        if text := delta.get("content"):
            pending = self._stage(1, index, pending, out)
            pending.text += text
        if calls := delta.get("tool_calls"):
            pending = self._stage(2, index, pending, out)
            for position, call in enumerate(calls):
                function = call.get("function") or {}
                pending.tools.append(
                    ToolDelta(
                        index=call.get("index", position),
                        id=call.get("id"),
                        name=function.get("name"),
                        arguments=function.get("arguments") or "",
                    )
                )
        return pending

    def _stage(self, stage: int, index: int, pending: _Pending, out: list[SampleEvent]) -> _Pending:
        if stage < pending.stage:
            self._emit(index, pending, out)
            pending = self._held[index] = _Pending()
        pending.stage = stage
        return pending

    def _evidence(self, pending: _Pending, ids: Sequence[int], logprobs: Json | None) -> None:
        """Adds the ids of one chunk with their log-probabilities."""
        values: list[Any] = []
        texts: list[str] = []
        tops: Sequence[Any] = ()
        if logprobs is not None:
            entries = logprobs.get("content")
            if entries is not None:  # chat
                values = [entry["logprob"] for entry in entries]
                if self._texts:
                    texts = [_text(entry) for entry in entries]
                if self._tops:
                    tops = [
                        [(other["token"], other["logprob"]) for other in entry.get("top_logprobs") or ()]
                        for entry in entries
                    ]
            elif (reported := logprobs.get("token_logprobs")) is not None:  # completions
                values = reported
                if self._texts:
                    texts = [""] * len(values) if self._tops else logprobs["tokens"]
                if self._tops:
                    tops = [list((row or {}).items()) for row in logprobs.get("top_logprobs") or ()]
        if len(values) != len(ids):
            if not ids:
                if not self._expect_ids:
                    return
                ids = (UNKNOWN_ID,) * len(values)
            values = [nan] * len(ids)
            texts, tops = [""] * len(ids), [()] * len(ids)
        pending.ids.extend(ids)
        pending.logprobs.extend(values if _all_real(values) else [_real(value) for value in values])
        if self._texts:
            pending.tokens.extend(texts)
        if self._tops:
            pending.top.extend(_top(row) for row in tops)

    def _emit(self, index: int, pending: _Pending, out: list[SampleEvent], *, last: bool = False) -> None:
        first = not self._started
        if first:
            self._started = True
        elif not (pending.ids or pending.text or pending.reasoning or pending.tools or pending.finish):
            return
        out.append(
            SampleEvent(
                index,
                pending.text,
                pending.reasoning,
                tuple(pending.tools),
                tuple(pending.ids),
                tuple(pending.logprobs),
                tuple(pending.tokens),
                tuple(pending.top),
                pending.finish,
                self._prompt if first else None,
                self._cached if last else None,
                pending.stop,
            )
        )


def _all_real(values: list[Any]) -> bool:
    try:
        return min(values, default=0.0) > MISSING_BELOW
    except TypeError:  # a null among them
        return False


def _real(value: float | None) -> float:
    return value if value is not None and value > MISSING_BELOW else nan


def _has_prompt(choice: Json) -> bool:
    return choice.get("prompt_token_ids") is not None


def _text(entry: Json) -> str:
    """The text of a sampled token, also where its name is its id."""
    token: str = entry["token"]
    if token.startswith("token_id:") and (raw := entry.get("bytes")) is not None:
        return bytes(raw).decode(errors="replace")
    return token


def _top(row: Iterable[tuple[str, float]]) -> tuple[TopLogprob, ...]:
    """The alternatives of one token; their texts are looked up by the engine."""
    return tuple(
        TopLogprob(int(name[9:]) if name.startswith("token_id:") else UNKNOWN_ID, name, logprob)
        for name, logprob in row
    )
