"""The tokens of a trace or a call for the token view: a head with spans and findings, and chunks of tokens.

A sequence is read from the store once and kept for the requests that follow. A sequence of any length is sent in
chunks. A chunk holds ids, the log-probabilities of sampled tokens, and the text of each id that occurs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from cachetools import LRUCache

from polar_proxy.api import ApiContext
from polar_proxy.api.context import not_found, require
from polar_proxy.engines.token_texts import NoTextsError, token_texts
from polar_proxy.export.formats.training_rows import advantages_by_rollout
from polar_proxy.sequences import answer_sampling, assemble, find_choice
from polar_proxy.store import RolloutRow, Store
from polar_proxy.store.repositories.traces import TraceSummary
from polar_proxy.terminal import escape_controls
from polar_proxy.token_scale import PROBABILITIES, scale_legend
from polar_proxy.traces.audit import scored_temperature
from polar_proxy.types import AnswerSampling, CallRecord, EngineInfo, Json, Logprobs, Span, TokenIds

CHUNK = 16_384
"""Maximum number of tokens in one chunk."""
_KEPT = 4
"""Number of sequences that are kept in memory."""
_TEXTS_KEPT = 400_000
"""Number of token texts, of all models together, that are kept in memory."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens with their origin. `token_ids` int32 [n]; `logprobs` float32 [n], NaN where nothing was sampled."""

    title: str
    token_ids: TokenIds
    logprobs: Logprobs
    spans: Sequence[Json]
    """Consecutive tokens of one origin, in order."""
    findings: Sequence[Json]
    """Drift and other findings, each at its position."""
    facts: Json
    """Session, rollout, grade, advantage and other values of the whole sequence."""
    engine: EngineInfo | None

    def head(self) -> Json:
        return {
            "title": self.title,
            "length": len(self.token_ids),
            "scale": list(zip(PROBABILITIES, scale_legend(), strict=True)),
            "spans": self.spans,
            "findings": self.findings,
            "facts": self.facts,
        }


@dataclass
class TokenSources:
    """Reads token sequences and texts of tokens, and keeps the most recently used in memory."""

    _sequences: LRUCache[str, TokenSequence] = field(default_factory=lambda: LRUCache(_KEPT))
    _texts: LRUCache[tuple[str, int], str] = field(default_factory=lambda: LRUCache(_TEXTS_KEPT))

    async def of_trace(self, store: Store, trace_id: str) -> TokenSequence:
        """Return the tokens of a trace. Raises ApiError 404 if it does not exist."""
        if (known := self._sequences.get(trace_id)) is None:
            summary = await require("trace", trace_id, store.traces.summary(trace_id))
            known = self._sequences[trace_id] = await _read_trace(store, summary)
        return known

    async def of_call(self, store: Store, call_id: str) -> TokenSequence:
        """Return the prompt and the first answer of a call. Raises ApiError 404 if it does not exist."""
        if (known := self._sequences.get(call_id)) is None:
            call = await require("call", call_id, store.calls.get(call_id))
            known = self._sequences[call_id] = await asyncio.to_thread(_read_call, call)
        return known

    def forget(self, record_id: str) -> None:
        """Drop the kept tokens of this trace or call. The next request reads them from the store."""
        self._sequences.pop(record_id, None)

    async def chunk(self, context: ApiContext, sequence: TokenSequence, start: int) -> Json:
        """Return the tokens from `start` on, at most CHUNK: ids, log-probabilities (null: not sampled) and texts."""
        ids = sequence.token_ids[start : start + CHUNK]
        values = sequence.logprobs[start : start + CHUNK].tolist()
        found: Json = {
            "start": start,
            "ids": ids.tolist(),
            "logprobs": [None if math.isnan(value) else round(value, 4) for value in values],
        }
        try:
            found["texts"] = await self._texts_of(context, sequence.engine, ids)
        except NoTextsError as error:
            found |= {"texts": {}, "problem": str(error)}
        return found

    async def _texts_of(self, context: ApiContext, engine: EngineInfo | None, ids: TokenIds) -> dict[str, str]:
        """Return the text of each id. Keys are the ids as strings, as in JSON. Raises NoTextsError if the tokens cannot
        be decoded."""
        model = "" if engine is None else f"{engine.engine} {engine.model}"
        wanted = np.unique(ids)
        unknown = np.array([one for one in wanted.tolist() if (model, one) not in self._texts], np.int32)
        if unknown.size:
            (texts,) = await token_texts([unknown], engine, context.settings.engine, context.engine)
            for one, text in zip(unknown.tolist(), texts, strict=True):
                self._texts[model, one] = escape_controls(text)
        return {str(one): self._texts[model, one] for one in wanted.tolist() if (model, one) in self._texts}


def _read_call(call: CallRecord) -> TokenSequence:
    spans = []
    if call.prompt_ids is not None and len(call.prompt_ids):
        spans.append(Span("context", call.call_id, 0, len(call.prompt_ids)))
    if call.choices and len(call.choices[0].token_ids):
        first = call.choices[0]
        spans.append(Span("sampled", call.call_id, 0, len(first.token_ids), first.index))
    calls = {call.call_id: call}
    token_ids, _, logprobs = assemble(spans, calls)
    facts = {"session_id": call.session_id, "call_id": call.call_id, "logprob_mode": call.logprob_mode}
    return TokenSequence(
        f"Call {call.call_id}", token_ids, logprobs, _describe_spans(spans, calls), [], facts, call.engine
    )


async def _read_trace(store: Store, summary: TraceSummary) -> TokenSequence:
    stored = await store.traces.of_session(summary.session_id, builder=summary.builder, text=False)
    trace = next((one for one in stored.traces if one.trace_id == summary.trace_id), None)
    if trace is None:
        raise not_found("trace", summary.trace_id)
    calls = {call.call_id: call for call in stored.trace_calls}
    facts: Json = {
        "session_id": summary.session_id,
        "rollout_id": summary.rollout_id,
        "builder": summary.builder,
        "grade": summary.grade,
        "reward": summary.reward,
        "advantage": await advantage_of(store, summary),
        "trained_tokens": summary.trained_tokens,
        "logprob_mode": trace.sampling[0].logprob_mode if trace.sampling else None,
        "branch_at": summary.branch_at,
        "grade_reasons": (summary.certificate or {}).get("grade_reasons", []),
    }
    infos = [call.engine for call in calls.values() if call.engine is not None]
    return TokenSequence(
        f"Trace {trace.trace_id}",
        trace.token_ids,
        trace.logprobs,
        _describe_spans(trace.spans, calls, trace.rescored),
        _findings(trace.spans, summary.certificate or {}),
        facts,
        infos[0] if infos else None,
    )


async def advantage_of(store: Store, trace: TraceSummary) -> float | None:
    """Return the GRPO advantage of a trace's rollout within its group. None for a trace without a rollout, and for a
    rollout that has no advantage (`group_advantages`)."""
    rollout = None if trace.rollout_id is None else await store.rollouts.get(trace.rollout_id)
    if rollout is None:
        return None
    own = group_advantages(await store.rollouts.find(group_id=rollout.group_id)).get(rollout.rollout_id)
    return None if own is None else round(own, 4)


def group_advantages(rows: Iterable[RolloutRow]) -> dict[str, float | None]:
    """Return rollout id -> GRPO advantage within the group; None for a rollout without a reward.

    Rollouts that have not ended do not count, and are not in the result. As in training, a reward counts even if some
    calls of its rollout were not recorded.
    """
    return advantages_by_rollout({row.rollout_id: row.reward for row in rows if row.final})


def _describe_spans(spans: Sequence[Span], calls: Mapping[str, CallRecord], rescored: bool = False) -> list[Json]:
    """Return each span as JSON: its first position in the sequence, its origin, and the data of its call."""
    found = []
    position = 0
    for span in spans:
        call = calls[span.call_id]
        choice = find_choice(call, span.choice) if span.kind == "sampled" else None
        sampling = None if choice is None else answer_sampling(call, choice)
        found.append(
            {
                **asdict(span),
                "at": position,
                "edge": call.edge,
                "prompt_mode": call.prompt_mode,
                "prompt_reason": call.prompt_reason,
                "versions": [] if sampling is None else list(sampling.versions),
                "reasoning_tokens": None if choice is None else choice.reasoning_tokens,
                "temperature": call.sampling.get("temperature"),
                "scored_at": None if sampling is None else _scored_at(sampling, rescored),
            }
        )
        position += span.end - span.start
    return found


def _scored_at(sampling: AnswerSampling, rescored: bool) -> float | None:
    """Return the temperature at which an engine must score an answer, so that its values are comparable to the
    recorded log-probabilities.

    None if the recorded log-probabilities are from a distribution that an engine cannot score, as with top_p or
    temperature 0."""
    if sampling.logprob_mode == "processed" and not rescored and (sampling.changes or not sampling.temperature):
        return None
    return scored_temperature(sampling, rescored)


def _findings(spans: Sequence[Span], certificate: Mapping[str, Any]) -> list[Json]:
    """Return the drift events and the audit's worst token, each at its position in the trace."""
    found = []
    for event in certificate.get("drift", ()):
        expected, actual = event["expected"], event["actual"]
        text = (
            f"Drift ({event['outcome']}): the prompt of {event['call_id']} has token {actual} where the tokens of "
            f"{event['base_call_id']} have {expected}."
        )
        found.append({"at": _place(spans, "context", event["call_id"], event["position"]), "text": text})
    audit = certificate.get("audit") or {}
    for name, text in (audit.get("findings") or {}).items():
        worst = audit.get("worst") or {}
        at = _place(spans, "sampled", worst.get("call_id"), worst.get("position", 0))
        found.append({"at": at, "text": f"Audit ({name}): {text}."})
    return found


def _place(spans: Sequence[Span], kind: str, call_id: str | None, position: int) -> int:
    """Convert a position in a call's prompt or answer to a position in the trace. `kind`: "context" for a position in
    the prompt, "sampled" for a position in the answer.

    Prompt and trace begin with the same tokens, so a position before the first span of the call stays the same.
    """
    at = 0
    for span in spans:
        if (span.kind, span.call_id) == (kind, call_id) and position < span.end:
            return at + position - span.start if position >= span.start else position
        at += span.end - span.start
    return min(position, max(at - 1, 0))
