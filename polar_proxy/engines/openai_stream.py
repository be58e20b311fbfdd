"""Decode answers of an OpenAI-compatible server, streamed or not, to `SampleEvent`s or typed errors. No I/O.

Invariant: all `token_ids` that the server sent for a choice come out once and in order, each with the log-probability
that the server reported for it. Missing values are marked as unknown and never made up:

* log-probability `nan`: no evidence for this token. For example, vLLM sends -9999.0 if it has no log-probability or
  has clamped it. If a chunk's ids and log-probabilities differ in number, all its log-probabilities are `nan`.
* token id -1: a log-probability came without its id.

Some servers send each sampled id twice: in `token_ids`, and as the text `token_id:N` beside the log-probability. If the
two differ, the answer is an error, because it is unknown which token was sampled.

A call with such values is answered like any other, and must not be trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from operator import itemgetter
from typing import Any

import orjson

from polar_proxy.errors import EngineError, PolarError, RequestError
from polar_proxy.types import Json, SampleEvent, Sampling, ToolDelta, TopLogprob, Usage

MISSING_BELOW = -9000.0
"""A log-probability below this counts as missing. vLLM floors log-probabilities at -9999.0; no float32 softmax over
real logits gives such a small value."""
UNKNOWN_ID = -1
_TOKEN_OF, _LOGPROB_OF = itemgetter("token"), itemgetter("logprob")
_ID_NAME = "token_id:"
"""Prefix of a token's text if the server sends ids in place of texts."""
_CONTEXT_LENGTH = re.compile(r"maximum context length|longer than the maximum model length", re.IGNORECASE)


@dataclass(slots=True)
class _PendingEvent:
    """Data of one choice that no event has passed on yet."""

    stage: int = 0
    text: str = ""
    reasoning: str = ""
    tools: list[ToolDelta] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    entries: list[Json] = field(default_factory=list)
    """The log-probabilities of the last ids as the server sent them. `ChunkDecoder._read_entries` reads them."""
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top: list[tuple[TopLogprob, ...]] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None
    versions: tuple[tuple[int, str], ...] = ()


class ChunkDecoder:
    """Decoder of one answer into events. The answer arrives as the chunks of a stream, or as one object.

    `feed` merges all chunks of one read of the socket into one event per choice. So a busy gateway handles fewer,
    larger events, and an idle one passes on each token as it comes.
    """

    def __init__(self, sampling: Sampling, name: str, *, expect_ids: bool = True) -> None:
        """`name` is the server's name in error messages. `expect_ids=False` is for servers that send no token ids."""
        self._name = name
        self._expect_ids = expect_ids
        self._texts = sampling.logprobs or bool(sampling.top_logprobs)
        self._tops = bool(sampling.top_logprobs)
        self._open = set(range(sampling.n))
        self._prompt: list[int] | None = None
        self._started = False
        self._held: dict[int, _PendingEvent] = {}
        self._cached: int | None = None
        self._usage: Usage | None = None

    def feed(self, chunks: Iterable[Json]) -> list[SampleEvent]:
        """Return the events that these chunks complete. Raises EngineError or RequestError for an error chunk."""
        try:
            return self._feed(chunks)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"{self._name} sent an answer in an unknown format: {error!r}.") from error

    def end(self) -> list[SampleEvent]:
        """Return the last event of each choice. Raises EngineError if the answer is not complete."""
        if self._open:
            raise EngineError(f"{self._name} broke off in the middle of its answer.")
        out: list[SampleEvent] = []
        for index in sorted(self._held):
            self._emit(index, self._held[index], out, last=True)
        self._held = {}
        return out

    def _feed(self, chunks: Iterable[Json]) -> list[SampleEvent]:
        out: list[SampleEvent] = []
        held = self._held
        plain = not self._texts
        for chunk in chunks:
            choices = chunk.get("choices")
            if self._prompt is None and not self._started:
                self._find_prompt(chunk, choices or ())
            if usage := chunk.get("usage"):
                self._add_usage(usage, chunk)
            if not choices:
                if "error" in chunk:
                    raise self._error(chunk)
                continue
            for choice in choices:
                index = choice["index"]
                pending = held.get(index)
                if pending is None:
                    pending = held[index] = _PendingEvent()
                if delta := choice.get("delta") or choice.get("message"):
                    pending = self._add_delta(index, pending, delta, out)
                elif text := choice.get("text"):
                    pending.text += text
                ids = choice.get("token_ids")
                logprobs = choice.get("logprobs")
                if plain and ids and logprobs and len(ids) == len(entries := logprobs.get("content") or ()):
                    pending.ids += ids  # the most frequent case: the entries of many chunks are read together
                    pending.entries += entries
                elif ids or logprobs:
                    self._add_evidence(pending, ids or (), logprobs)
                if finish := choice.get("finish_reason"):
                    pending.finish = finish
                    stop = choice.get("stop_reason")  # a stop string, or the id of a stop token
                    pending.stop = stop if isinstance(stop, str) else None
                    if spans := choice.get("weight_versions"):
                        pending.versions = version_runs(spans)
                    self._open.discard(index)
        for pending in held.values():
            self._read_entries(pending)
        # The last event waits for the end of the answer, because the usage chunk comes after it.
        for index in [index for index, pending in held.items() if self._open or pending.finish is None]:
            self._emit(index, held.pop(index), out)
        return out

    def _error(self, chunk: Json) -> Exception:
        error = chunk["error"]
        code = error.get("code") if isinstance(error, dict) else None
        # A request is at fault only if it was refused before anything was generated.
        status = code if isinstance(code, int) and not (self._started and code < 500) else 500
        return api_error(chunk, status, self._name)

    def _add_usage(self, usage: Json, chunk: Json) -> None:
        if details := usage.get("prompt_tokens_details"):
            self._cached = details.get("cached_tokens")
        if not self._expect_ids:
            self._usage = openai_usage(usage, chunk)

    def _find_prompt(self, chunk: Json, choices: Sequence[Json]) -> None:
        """Store the prompt's ids if the chunk has them. A chat answer has them at the top level, a completion in each
        choice."""
        for holder in (chunk, *choices):
            if holder.get("prompt_token_ids") is not None:
                self._prompt = holder["prompt_token_ids"]
                return

    def _add_delta(self, index: int, pending: _PendingEvent, delta: Json, out: list[SampleEvent]) -> _PendingEvent:
        """Add a delta to the pending event of its choice, and return the pending event.

        In one event, reasoning comes before text, and text before tool calls. If the delta would break this order,
        emit the pending event and start a new one.
        """
        if len(delta) == 1 and pending.stage == 1 and (text := delta.get("content")):
            pending.text += text  # the most frequent case
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
                pending.tools.append(tool_delta(call, position))
        return pending

    def _stage(self, stage: int, index: int, pending: _PendingEvent, out: list[SampleEvent]) -> _PendingEvent:
        if stage < pending.stage:
            self._read_entries(pending)
            self._emit(index, pending, out)
            pending = self._held[index] = _PendingEvent()
        pending.stage = stage
        return pending

    def _read_entries(self, pending: _PendingEvent) -> None:
        """Read the collected entries of a pending event, one for each of its last ids."""
        if entries := pending.entries:  # `map`, because loops over all tokens would take most of the decoding time
            self._check_ids(pending.ids[-len(entries) :], _texts_of(entries))
            pending.logprobs += _reals(list(map(_LOGPROB_OF, entries)))
            pending.entries = []

    def _add_evidence(self, pending: _PendingEvent, ids: Sequence[int], logprobs: Json | None) -> None:
        """Add the ids of one chunk with their log-probabilities."""
        self._read_entries(pending)
        values: Sequence[Any] = ()
        if logprobs:
            reported = logprobs.get("token_logprobs")  # completions
            values = list(map(_LOGPROB_OF, logprobs.get("content") or ())) if reported is None else reported
        aligned = len(values) == len(ids)
        if ids and aligned and logprobs:
            self._check_ids(ids, _token_texts(logprobs))
        if not ids and not aligned:
            if not self._expect_ids:
                return
            ids = (UNKNOWN_ID,) * len(values)
        pending.ids.extend(ids)
        pending.logprobs.extend(_reals(values) if aligned else [nan] * len(ids))
        if self._texts:
            entries = _chat_entries(logprobs) if aligned and logprobs else [{"token": ""}] * len(ids)
            pending.tokens.extend(map(_text, entries))
            if self._tops:
                pending.top.extend(map(_top, entries))

    def _check_ids(self, ids: Sequence[int], texts: Sequence[str]) -> None:
        """Raise EngineError if the server sent two different ids for a token. A text in `texts` may be `token_id:N`.
        Then N must be the token's id in `ids`."""
        if len(ids) == len(texts) and _ID_NAME not in "".join(texts):  # most servers send no ids here
            return
        for token_id, text in zip(ids, texts, strict=True):
            if text.startswith(_ID_NAME) and text[len(_ID_NAME) :] != str(token_id):
                raise EngineError(f"{self._name} sent two ids for one token, {token_id} and {text!r}.")

    def _emit(self, index: int, pending: _PendingEvent, out: list[SampleEvent], *, last: bool = False) -> None:
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
                versions=pending.versions,
                # Without ids to count, the agent uses this to know how full its context is.
                usage=self._usage if last and not self._expect_ids else None,
            )
        )


def openai_usage(usage: Json, answer: Json) -> Usage | None:
    """Return the token counts of a chat or completions answer; None if they are missing or not integers."""
    prompt, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(sampled, int):
        return None
    details = usage.get("prompt_tokens_details") or {}
    tier = answer.get("service_tier")
    return Usage(
        input_tokens=prompt,
        output_tokens=sampled,
        cached_tokens=details.get("cached_tokens"),
        cache_write_tokens=details.get("cache_write_tokens"),
        reasoning_tokens=(usage.get("completion_tokens_details") or {}).get("reasoning_tokens"),
        model=answer.get("model"),
        service_tier=None if tier in (None, "auto", "default") else str(tier),
    )


def version_runs(spans: Sequence[Json]) -> tuple[tuple[int, str], ...]:
    """Return (first position, policy version) of each run of tokens that one version sampled.

    `spans`: the `weight_versions` that vLLM sends at the end of an answer, `{"version", "start", "end"}` each. If the
    spans overlap, have a gap or begin after the first token, all of them are ignored.
    """
    out: list[tuple[int, str]] = []
    end = 0
    for span in spans:
        if span["start"] != end or span["end"] < end:
            return ()
        if span["end"] > end and (not out or out[-1][1] != str(span["version"])):
            out.append((end, str(span["version"])))
        end = span["end"]
    return tuple(out)


def _token_texts(logprobs: Json) -> Sequence[str]:
    """Return the token text that belongs to each log-probability of a chunk."""
    if "token_logprobs" not in logprobs:
        return _texts_of(logprobs.get("content") or ())
    return logprobs.get("tokens") or [""] * len(logprobs["token_logprobs"] or ())


def _texts_of(entries: Sequence[Json]) -> Sequence[str]:
    try:
        return list(map(_TOKEN_OF, entries))
    except KeyError:  # some servers leave the text out
        return [entry.get("token", "") for entry in entries]


def _chat_entries(logprobs: Json) -> Sequence[Json]:
    """Return a chunk's log-probabilities in the format of Chat Completions, one entry for each token."""
    if "token_logprobs" not in logprobs:
        return logprobs.get("content") or ()
    values = logprobs["token_logprobs"] or ()
    texts = logprobs.get("tokens") or [""] * len(values)
    tops = logprobs.get("top_logprobs") or [None] * len(values)
    return [
        {
            "token": text,
            "logprob": value,
            "top_logprobs": [{"token": name, "logprob": other} for name, other in (top or {}).items()],
        }
        for text, value, top in zip(texts, values, tops, strict=True)
    ]


def tool_delta(call: Json, position: int) -> ToolDelta:
    """Return a delta of a tool call. `position` is used as the tool call's index if the server sent none."""
    function = call.get("function") or {}
    return ToolDelta(
        index=call.get("index", position),
        id=call.get("id"),
        name=function.get("name"),
        arguments=function.get("arguments") or "",
    )


def _real(value: float | None) -> float:
    return value if value is not None and value > MISSING_BELOW else nan


def _reals(values: Sequence[Any]) -> Sequence[float]:
    """Return the values converted by `_real`. Usually no value changes, and `values` itself is returned."""
    try:
        if min(values, default=0.0) > MISSING_BELOW:
            return values
    except TypeError:  # one of them is None
        pass
    return [_real(value) for value in values]


def _text(entry: Json) -> str:
    """Return the text of a sampled token; empty if the server sent only its id."""
    token: str = entry["token"]
    if not token.startswith(_ID_NAME):
        return token
    raw = entry.get("bytes")
    return "" if raw is None else bytes(raw).decode(errors="replace")


def _top(entry: Json) -> tuple[TopLogprob, ...]:
    """Return the alternatives of one token. An alternative named only by its id gets its text later, from the
    engine."""
    named = [(other["token"], other["logprob"]) for other in entry.get("top_logprobs") or ()]
    return tuple(
        TopLogprob(int(name[len(_ID_NAME) :]) if name.startswith(_ID_NAME) else UNKNOWN_ID, name, logprob)
        for name, logprob in named
    )


def parse_json(raw: bytes, url: str) -> Any:
    """Decode JSON that the engine at `url` sent. Raises EngineError."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        start = raw[:80].decode(errors="replace")
        raise EngineError(f"The engine at {url} sent malformed JSON ({error}): {start!r}.") from error


def api_error(body: Any, status: int, name: str) -> PolarError:
    """Return the typed error for an OpenAI error body. `name`: the server's name in the error's text.

    A refused key (401, 403) and an unknown route (404, if the error has no `param` and no `code`, and its text does not
    mention a model) are faults of the configuration, which the agent cannot fix: EngineError with status 502. Overload
    (429, 503) is an EngineError that keeps its status, so that the agent waits and tries again. Any other 4xx is the
    request's own fault: RequestError with its status, `param` and `code`. Any other status is an EngineError with 502.
    """
    error = body.get("error", body) if isinstance(body, Mapping) else {}
    if isinstance(error, Mapping):
        text = str(error.get("message") or error.get("detail") or "")
        param, code = error.get("param"), error.get("code")
    else:  # some servers send {"error": "text"}
        text, param, code = str(error), None, None
    text = text or (body if isinstance(body, str) else "") or f"HTTP {status}"
    if status in (401, 403):
        return EngineError(f"{name} refused the API key it was given ({status}): {text} Set the engine's API key.")
    if status == 404 and param is None and not isinstance(code, str) and "model" not in text.lower():
        return EngineError(f"{name} does not have this route (404 {text}). Is it an OpenAI-compatible server?")
    if status in (429, 503):
        return EngineError(f"{name} is overloaded ({status}): {text}", status=status)
    if 400 <= status < 500:
        # vLLM repeats the status in `code`; agents recognise a conversation that is too long by OpenAI's own code.
        error_code = code if isinstance(code, str) else None
        if _CONTEXT_LENGTH.search(text):
            error_code = "context_length_exceeded"
        return RequestError(text, status=status, param=param if isinstance(param, str) else None, code=error_code)
    return EngineError(f"{name} failed ({status}): {text}")


class SseDecoder:
    """Decoder of an event stream into JSON. It decodes all events of one read of the socket together.

    A read costs one `bytes.split` and one call of the JSON parser. An event usually has one token, so
    decoding each event by itself would cost more than all other work on its token.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._rest = b""
        self.done = False
        """True once `data: [DONE]` has arrived."""

    def feed(self, data: bytes) -> list[Json]:
        """Return the events that `data` completes. Raises EngineError for malformed JSON."""
        data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n")
        if end < 0:
            self._rest = data
            return []
        block, self._rest = data[:end], data[end + 2 :]
        payloads = _payloads(block)
        if payloads and payloads[-1] == b"[DONE]":
            payloads.pop()
            self.done = True
        if not payloads:
            return []
        try:
            events: list[Json] = orjson.loads(b"[" + b",".join(payloads) + b"]")
        except orjson.JSONDecodeError:
            for payload in payloads:
                parse_json(payload, self._url)  # raises for the malformed one
            raise
        return events


def _payloads(block: bytes) -> list[bytes]:
    """Return the data of each event in a block of whole events. Events without data are left out."""
    payloads = block.removeprefix(b"data: ").split(b"\n\ndata: ")
    if block.startswith(b"data: ") and b"\n" not in b"".join(payloads):  # one line of data each
        return [payload for payload in payloads if payload]
    return [payload for event in block.split(b"\n\n") if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    """Return the data of one event; empty for a comment or another field."""
    lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
