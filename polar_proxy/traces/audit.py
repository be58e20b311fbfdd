"""Audit: the recorded log-probabilities of traces against those of a fresh, teacher-forced pass.

Promises, each a test:

* Only sampled tokens are compared, each with the fresh log-probability of that token behind all that stands before it
  (in a `tree`, the whole path). What cannot be compared is counted with its reason and never as a difference of 0.
* A trace with a difference beyond the tolerance, or whose numbers are of another log-probability mode than the record
  says, is `refused`. No other trace gets a better grade than its builder gave it; an audit that finds nothing takes an
  earlier refusal by audit back.
* A sequence that is the beginning of a longer one is not run twice.

Reasons for which a token is not compared: `policy_version` (sampled by other weights than the engine has loaded),
`processed_sampling` (recorded of a distribution that was changed by temperature, top_p, ..., where a fresh pass gives
the model's own), `beyond_context` (longer than the engine takes), `no_fresh_logprob` (the engine gave none),
`unknown_engine` (the record does not say what sampled it).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from polar_proxy.engines.base import Engine
from polar_proxy.errors import StoreError, UsageError
from polar_proxy.traces.grades import TRAINABLE, is_off_distribution, versions
from polar_proxy.traces.paths import trace_path
from polar_proxy.traces.scoring import ScoredTokens, score_all
from polar_proxy.types import CallRecord, EngineInfo, Json, LogprobMode, Logprobs, TokenIds, Trace

TOLERANCE = 1e-2
"""Nats. In fp32 a batched decode and a prefill of the same tokens differ by 1e-5 to 1e-3; an importance ratio that is
wrong by one per cent still lies far inside of every clip range. bf16 needs more (docs/audit.md)."""
CONTEXT_TOKENS = 24
"""Tokens shown in front of a token that differs most."""
_WORST_OF_TRACE = 3
_INFORMATIVE = -0.1
"""Log-probability below which a token tells the modes apart: a token that was sure looks alike in both."""
_INFORMATIVE_TOKENS = 16
_FITS = 0.95


@dataclass(frozen=True, slots=True)
class AuditReference:
    """What the traces are compared with. `same_model`: the caller vouches for the model, whatever it is called."""

    info: EngineInfo
    policy_version: str | None
    tolerance: float = TOLERANCE
    same_model: bool = False


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """One token that differs; `position` counts in its choice, `before` are the ids in front of it."""

    trace_id: str
    call_id: str
    choice: int
    position: int
    token_id: int
    recorded: float
    fresh: float
    policy_version: str | None
    before: tuple[int, ...]

    @property
    def size(self) -> float:
        return abs(self.recorded - self.fresh)

    def to_json(self) -> Json:
        return {
            "call_id": self.call_id,
            "choice": self.choice,
            "position": self.position,
            "token_id": self.token_id,
            "recorded": self.recorded,
            "fresh": self.fresh,
        }


@dataclass(frozen=True, slots=True)
class TraceAudit:
    """What came of one trace. `differences`: |recorded - fresh|, float32 [compared], by policy version."""

    trace_id: str
    built_grade: str
    grade: str
    differences: Mapping[str | None, Logprobs]
    skipped: Mapping[str, int]
    """Sampled tokens that were not compared, by reason."""
    findings: Mapping[str, str]
    """beyond_tolerance, wrong_mode, not_policy_samples: each with what was seen."""
    worst: tuple[LogprobDifference, ...]

    @property
    def tokens(self) -> int:
        return sum(len(values) for values in self.differences.values())

    def to_json(self, against: AuditReference, now: float) -> Json:
        """For the certificate. `now`: seconds since the epoch."""
        tally = DifferenceStats()
        for values in self.differences.values():
            tally.add(values)
        return {
            "at": now,
            "engine": {"engine": against.info.engine, "version": against.info.version, "model": against.info.model},
            "policy_version": against.policy_version,
            "tolerance": against.tolerance,
            "built_grade": self.built_grade,
            "tokens": tally.tokens,
            "skipped_tokens": dict(self.skipped),
            "max_abs_diff": tally.largest,
            "mean_abs_diff": tally.mean,
            "findings": dict(self.findings),
            "worst": self.worst[0].to_json() if self.worst else None,
        }


@dataclass(slots=True)
class DifferenceStats:
    """Differences of many tokens. `largest` and `mean` are None where nothing was compared."""

    traces: int = 0
    tokens: int = 0
    largest: float | None = None
    total: float = 0.0

    def add(self, differences: Logprobs) -> None:
        if len(differences):
            self.tokens += len(differences)
            self.largest = max(self.largest or 0.0, float(differences.max()))
            self.total += float(differences.sum(dtype=np.float64))

    @property
    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None

    def to_json(self) -> Json:
        return {
            "traces": self.traces,
            "tokens": self.tokens,
            "max_abs_diff": self.largest,
            "mean_abs_diff": self.mean,
        }


async def audit(
    engine: Engine,
    against: AuditReference,
    traces: Sequence[Trace],
    calls: Sequence[CallRecord],
    *,
    built_grades: Mapping[str, str] | None = None,
    scorers: Mapping[str, Json] | None = None,
    at_once: int = 4,
    scored: ScoredTokens | None = None,
) -> list[TraceAudit]:
    """Audit all traces of one builder and one session.

    `built_grades`: the builder's own grade of traces that an earlier audit may have changed. `scorers`: of rescored
    traces what their certificates name as the engine of their numbers. Both by trace id. At most `at_once` sequences
    are scored at a time. Raises UsageError where a trace is of another model or template than the engine's.
    """
    by_id = {call.call_id: call for call in calls}
    by = scorers or {}
    for trace in traces if not against.same_model else ():
        if trace.trace_id in by:
            _require_same_model(by[trace.trace_id].get("model"), None, against.info)
            continue
        for span in trace.spans:
            info = by_id[span.call_id].engine
            if span.kind == "sampled" and info is not None:
                _require_same_model(info.model, info.template_hash, against.info)
    wholes = whole_paths(traces)
    fresh = await score_all([wholes[trace.trace_id] for trace in traces], engine, at_once, scored)
    found = []
    for trace, values in zip(traces, fresh, strict=True):
        grade = (built_grades or {}).get(trace.trace_id, trace.grade)
        whole = wholes[trace.trace_id]
        runs = list(_runs(trace, by_id, by.get(trace.trace_id)))
        found.append(await asyncio.to_thread(_compare, trace, whole, values, runs, against, grade))
    return found


def whole_paths(traces: Sequence[Trace]) -> dict[str, TokenIds]:
    """Trace id -> all its tokens with those of its parents (builder `tree`) in front, int32 [n].

    Raises StoreError where a parent is missing.
    """
    by_id = {trace.trace_id: trace for trace in traces}
    try:
        return {
            trace.trace_id: trace.token_ids if trace.parent_trace_id is None else trace_path(trace, by_id).token_ids
            for trace in traces
        }
    except ValueError as error:
        raise StoreError(str(error)) from error


def _require_same_model(model: str | None, before: str | None, now: EngineInfo) -> None:
    """`model` and template hash (`before`) are those of the record."""
    if model != now.model:
        raise UsageError(
            f"There are traces of the model {model!r}, and the engine serves {now.model!r}: choose its own "
            f"with --where 'model={now.model}'. If it is the same model under another name, say --same-model."
        )
    after = now.template_hash
    if before is not None and after is not None and _kind(before) == _kind(after) and before != after:
        raise UsageError(
            f"The engine's chat template or tokenizer is not the one that traces of {model!r} were recorded "
            "with: serve the model as it was. If only the template was edited, say --same-model."
        )


def _kind(template_hash: str) -> str:
    """Servers that do not show their template are known by what they render (`render:...`)."""
    return template_hash.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class SampledRun:
    """Neighbouring sampled tokens of one choice under one policy version: [start, end) of the trace's own tokens."""

    call: CallRecord
    choice: int
    first: int
    """Position of its first token in the choice."""
    start: int
    end: int
    version: str | None


def _runs(trace: Trace, calls: Mapping[str, CallRecord], scorer: Json | None) -> Iterator[SampledRun]:
    """`scorer`: the engine that a rescored trace has its numbers from."""
    place = 0
    for span in trace.spans:
        here, place = place, place + span.end - span.start
        if span.kind != "sampled":
            continue
        call = calls[span.call_id]
        choice = next(choice for choice in call.choices if choice.index == span.choice)
        changes = versions(call, choice) if scorer is None else ((0, scorer["weight_version"]),)
        ends = [start for start, _ in changes[1:]] + [len(choice.token_ids)]
        for (start, version), end in zip(changes, ends, strict=True):
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                offset = here - span.start
                yield SampledRun(call, span.choice, low, low + offset, high + offset, version)


def _compare(
    trace: Trace,
    whole: TokenIds,
    values: npt.NDArray[np.float64],
    runs: Sequence[SampledRun],
    against: AuditReference,
    built_grade: str,
) -> TraceAudit:
    offset = len(whole) - len(trace.token_ids)
    differences: dict[str | None, list[Logprobs]] = {}
    skipped: Counter[str] = Counter()
    findings: dict[str, str] = {}
    worst: list[LogprobDifference] = []
    by_temperature: dict[tuple[LogprobMode, float], LogprobPairs] = {}
    marked = False
    for run in runs:
        recorded = trace.logprobs[run.start : run.end].astype(np.float64)
        fresh = values[offset + run.start : offset + run.end]
        mode: LogprobMode = "raw" if trace.rescored else run.call.logprob_mode
        plain = trace.rescored or not is_off_distribution(replace(run.call, logprob_mode="raw"))
        marked = marked or (mode == "raw" and not plain)
        reason = _incomparable(run, against)
        if reason is not None:
            skipped[reason] += len(recorded)
            continue
        known = np.isfinite(fresh) & np.isfinite(recorded)
        for missing in np.flatnonzero(~known):
            beyond = offset + run.start + int(missing) >= against.info.context_length - 1
            skipped["beyond_context" if beyond else "no_fresh_logprob"] += 1
        temperature = run.call.sampling.get("temperature")
        if not plain and temperature:
            by_temperature.setdefault((mode, float(temperature)), LogprobPairs()).add(recorded[known], fresh[known])
        if mode == "processed" and not plain:
            skipped["processed_sampling"] += int(np.count_nonzero(known))
            continue
        sizes = np.abs(recorded - fresh)[known].astype(np.float32)
        differences.setdefault(run.version, []).append(sizes)
        for place in np.flatnonzero(known)[np.argsort(-sizes, kind="stable")[:_WORST_OF_TRACE]]:
            at = run.start + int(place)
            worst.append(
                LogprobDifference(
                    trace_id=trace.trace_id,
                    call_id=run.call.call_id,
                    choice=run.choice,
                    position=run.first + int(place),
                    token_id=int(trace.token_ids[at]),
                    recorded=float(recorded[place]),
                    fresh=float(fresh[place]),
                    policy_version=run.version,
                    before=tuple(whole[max(0, offset + at - CONTEXT_TOKENS) : offset + at].tolist()),
                )
            )
    worst.sort(key=lambda difference: -difference.size)
    for (mode, temperature), numbers in by_temperature.items():
        found = wrong_mode(*numbers.arrays(), mode, temperature, against.tolerance)
        if found is not None:
            findings["wrong_mode"] = f"recorded as {mode}, but at temperature {temperature:g} the numbers are {found}"
    if worst and worst[0].size > against.tolerance:
        findings["beyond_tolerance"] = f"largest difference {worst[0].size:.3g}, tolerance {against.tolerance:g}"
    if marked:
        findings["not_policy_samples"] = "raw log-probabilities under a temperature or a cut distribution"
    grade = built_grade
    if "wrong_mode" in findings or "beyond_tolerance" in findings:
        grade = "refused"
    elif marked and grade in TRAINABLE:
        grade = "marked"
    return TraceAudit(
        trace_id=trace.trace_id,
        built_grade=built_grade,
        grade=grade,
        differences={version: np.concatenate(parts) for version, parts in differences.items()},
        skipped=skipped,
        findings=findings,
        worst=tuple(worst[:_WORST_OF_TRACE]),
    )


def _incomparable(run: SampledRun, against: AuditReference) -> str | None:
    if run.call.engine is None:
        return "unknown_engine"
    # Where one side does not tell its version there is nothing to hold against it: the numbers will.
    told = run.version is not None and against.policy_version is not None
    return "policy_version" if told and run.version != against.policy_version else None


@dataclass(slots=True)
class LogprobPairs:
    recorded: list[npt.NDArray[np.float64]] = field(default_factory=list)
    fresh: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def add(self, recorded: npt.NDArray[np.float64], fresh: npt.NDArray[np.float64]) -> None:
        self.recorded.append(recorded)
        self.fresh.append(fresh)

    def arrays(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return np.concatenate(self.recorded), np.concatenate(self.fresh)


def wrong_mode(
    recorded: npt.NDArray[np.float64],
    fresh: npt.NDArray[np.float64],
    mode: LogprobMode,
    temperature: float,
    tolerance: float,
) -> LogprobMode | None:
    """The mode that the numbers (float64 [n] each) are of, where it is not `mode`; None where they fit or cannot tell.

    With z the logits, raw is log softmax(z) and processed log softmax(z / T) = raw / T - log sum p^(1/T). That sum is
    above 1 for T > 1 and below it for T < 1 (cutting makes it smaller still), so for processed numbers
    recorded - raw / T has a known sign, though the rest of the distribution is not at hand.
    """
    informative = fresh < _INFORMATIVE
    if np.count_nonzero(informative) < _INFORMATIVE_TOKENS or abs(1 / temperature - 1) < 0.1:
        return None
    recorded, fresh = recorded[informative], fresh[informative]
    raw = float(np.mean(np.abs(recorded - fresh) <= tolerance)) >= _FITS
    if mode == "processed":
        return "raw" if raw else None
    rest = recorded - fresh / temperature
    processed = float(np.mean(rest <= tolerance if temperature > 1 else rest >= -tolerance)) >= _FITS
    return "processed" if processed and not raw else None
