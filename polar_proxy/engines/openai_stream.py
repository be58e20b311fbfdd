"""vLLM's answers, streamed or in one piece, as `SampleEvent`s. Pure data.

Invariant: of each choice, all `token_ids` that the server sent come out, once and in order, each with the
log-probability that the server reported for it. What the server does not say is said to be unknown, never made up:

* log-probability `nan`: no evidence for this token. vLLM says -9999.0 for a token whose log-probability it does not
  have or has clamped, and a chunk whose ids and log-probabilities differ in number cannot be aligned.
* token id -1: a log-probability came without its id.

Such a call is answered as any other (the agent is not to blame) and must not be trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

from polar_proxy.engines.openai_client import api_error
from polar_proxy.errors import EngineError
from polar_proxy.types import Json, SampleEvent, Sampling, ToolDelta, TopLogprob

MISSING_BELOW = -9000.0
"""vLLM floors at -9999.0; no float32 softmax over real logits comes near."""
UNKNOWN_ID = -1


class _PendingEvent:
    """What has come for one choice and has not gone out yet."""

    __slots__ = (
        "finish",
        "ids",
        "logprobs",
        "reasoning",
        "stage",
        "stop",
        "text",
        "tokens",
        "tools",
        "top",
        "versions",
    )

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
        self.versions: tuple[tuple[int, str], ...] = ()


class ChunkDecoder:
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
        self._held: dict[int, _PendingEvent] = {}
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
                    pending = held[index] = _PendingEvent()
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
                    if spans := choice.get("weight_versions"):
                        pending.versions = version_runs(spans)
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

    def _delta(self, index: int, pending: _PendingEvent, delta: Json, out: list[SampleEvent]) -> _PendingEvent:
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

    def _stage(self, stage: int, index: int, pending: _PendingEvent, out: list[SampleEvent]) -> _PendingEvent:
        if stage < pending.stage:
            self._emit(index, pending, out)
            pending = self._held[index] = _PendingEvent()
        pending.stage = stage
        return pending

    def _evidence(self, pending: _PendingEvent, ids: Sequence[int], logprobs: Json | None) -> None:
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
            )
        )


def version_runs(spans: Sequence[Json]) -> tuple[tuple[int, str], ...]:
    """(first position, policy version) of each run of an answer's tokens, from vLLM's `weight_versions`.

    They are `{"version", "start", "end"}` over the answer's tokens and come with its end only (weight-version docs of
    vLLM 0.33). Spans that do not tile the answer from its first token on tell nothing.
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
