"""Audit: compare the recorded log-probabilities of traces with those of a fresh, teacher-forced pass.

Promises, each a test:

* Only sampled tokens are compared, each with the fresh log-probability of that token given all tokens before it (in a
  `tree`, the whole path). A token that cannot be compared is counted with its reason, never as a difference of 0.
* A trace with a difference beyond the tolerance, or whose numbers are of another log-probability mode than recorded, is
  `rejected`. An audit never improves the builder's grade; an audit without findings withdraws an earlier rejection by
  an audit.
* A sequence that is the beginning of a longer one is not run twice.

Reasons for which a token is not compared: `policy_version` (sampled by other weights than the engine has loaded),
`processed_sampling` (recorded of a distribution that temperature, top_p, ... changed, whereas a fresh pass gives the
model's own), `beyond_context` (after the end of the engine's context), `no_fresh_logprob` (the engine returned no
value), `unknown_engine` (the record does not name the engine).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import numpy.typing as npt

from polar_proxy.engines.base import Engine
from polar_proxy.errors import StoreError, UsageError
from polar_proxy.sequences import trace_path
from polar_proxy.traces.grades import REJECTED, TRAINABLE, is_off_distribution, policy_versions
from polar_proxy.traces.scoring import ScoredTokens, score_all
from polar_proxy.types import CallRecord, EngineInfo, Json, LogprobMode, Logprobs, TokenIds, Trace

TOLERANCE = 1e-2
"""Nats. In fp32 a batched decode and a prefill of the same tokens differ by 1e-5 to 1e-3; an importance ratio that is
wrong by one per cent is still far inside of every clip range. bf16 needs more (docs/guide/data.md)."""
CONTEXT_TOKENS = 24
"""How many tokens are shown before a token that differs most."""
UNKNOWN = "unknown"
"""Counts traces without a harness (a session without a rollout), or tokens without a policy version."""
_WORST_PER_TRACE = 3
_WORST_IN_REPORT = 10
_INFORMATIVE = -0.1
"""Log-probability below which a token distinguishes the modes: a certain token has the same value in both."""
_INFORMATIVE_TOKENS = 16
_FITS = 0.95
_ENGINE_FIELDS = ("engine", "version", "model")


@dataclass(frozen=True, slots=True)
class AuditReference:
    """The engine and tolerance that traces are compared with."""

    info: EngineInfo
    policy_version: str | None
    tolerance: float = TOLERANCE
    same_model: bool = False
    """The caller guarantees that the engine serves the recorded model, even if its name differs."""


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """One token whose recorded and fresh log-probability differ."""

    trace_id: str
    call_id: str
    choice: int
    position: int
    """Position within the choice."""
    token_id: int
    recorded: float
    fresh: float
    policy_version: str | None
    before: tuple[int, ...]
    """The token ids before it."""

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


@dataclass(slots=True)
class DifferenceStats:
    """Differences of many tokens. `largest` and `mean` are None if nothing was compared."""

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


@dataclass(frozen=True, slots=True)
class TraceAudit:
    """The result for one trace."""

    trace_id: str
    built_grade: str
    grade: str
    differences: Mapping[str | None, Logprobs]
    """|recorded - fresh|, float32 [number of compared tokens], by policy version."""
    skipped: Mapping[str, int]
    """Sampled tokens that were not compared, by reason."""
    findings: Mapping[str, str]
    """beyond_tolerance, wrong_mode, not_policy_samples: each with its measurement."""
    worst: tuple[LogprobDifference, ...]

    @property
    def tokens(self) -> int:
        return sum(len(values) for values in self.differences.values())

    def to_json(self, reference: AuditReference, now: float) -> Json:
        """Return the certificate's `audit` field. `now`: seconds since the epoch."""
        stats = DifferenceStats()
        for values in self.differences.values():
            stats.add(values)
        info = asdict(reference.info)
        return {
            "at": now,
            "engine": {name: info[name] for name in _ENGINE_FIELDS},
            "policy_version": reference.policy_version,
            "tolerance": reference.tolerance,
            "built_grade": self.built_grade,
            "tokens": stats.tokens,
            "skipped_tokens": dict(self.skipped),
            "max_abs_diff": stats.largest,
            "mean_abs_diff": stats.mean,
            "findings": dict(self.findings),
            "worst": self.worst[0].to_json() if self.worst else None,
        }


@dataclass(slots=True)
class AuditReport:
    """The results for many traces."""

    reference: AuditReference
    all: DifferenceStats = field(default_factory=DifferenceStats)
    grades: Counter[str] = field(default_factory=Counter)
    by_harness: defaultdict[str, DifferenceStats] = field(default_factory=lambda: defaultdict(DifferenceStats))
    by_policy_version: defaultdict[str, DifferenceStats] = field(default_factory=lambda: defaultdict(DifferenceStats))
    skipped: Counter[str] = field(default_factory=Counter)
    """Traces in which nothing was compared, by reason, and sessions without traces (`not_built`)."""
    skipped_tokens: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, str] = field(default_factory=dict)
    """trace id -> the findings"""
    worst: list[tuple[LogprobDifference, str]] = field(default_factory=list)
    """The tokens that differ most, largest first, each with its harness."""
    scored: ScoredTokens = field(default_factory=ScoredTokens)
    sessions: int = 0
    seconds: float = 0.0

    def add(self, audit: TraceAudit, harness: str) -> None:
        self.skipped_tokens.update(audit.skipped)
        if not audit.tokens and audit.grade != REJECTED:
            self.skipped[max(audit.skipped, key=audit.skipped.__getitem__, default="nothing_sampled")] += 1
            return
        self.grades[audit.grade] += 1
        self.findings.update(audit.findings.keys())
        if audit.grade == REJECTED:
            self.rejected[audit.trace_id] = "; ".join(audit.findings.values()) or "rejected by its builder"
        for stats in (self.all, self.by_harness[harness]):
            stats.traces += 1
        for version, differences in audit.differences.items():
            of_version = self.by_policy_version[version or UNKNOWN]
            of_version.traces += 1
            for stats in (self.all, self.by_harness[harness], of_version):
                stats.add(differences)
        self.worst += [(difference, harness) for difference in audit.worst]
        self.worst.sort(key=lambda entry: -entry[0].size)
        del self.worst[_WORST_IN_REPORT:]

    def to_json(self, texts: Sequence[tuple[str, str]]) -> Json:
        """`texts`: for each of `worst` the text of the token and of the tokens before it."""
        info = asdict(self.reference.info)
        return {
            **self.all.to_json(),
            "grades": dict(self.grades),
            "by_harness": {name: stats.to_json() for name, stats in self.by_harness.items()},
            "by_policy_version": {name: stats.to_json() for name, stats in self.by_policy_version.items()},
            "skipped": dict(self.skipped),
            "skipped_tokens": dict(self.skipped_tokens),
            "findings": dict(self.findings),
            "rejected": self.rejected,
            "worst": [
                {
                    "trace_id": difference.trace_id,
                    **difference.to_json(),
                    "diff": difference.size,
                    "harness": harness,
                    "policy_version": difference.policy_version,
                    "token": token,
                    "before": before,
                }
                for (difference, harness), (token, before) in zip(self.worst, texts, strict=True)
            ],
            "tolerance": self.reference.tolerance,
            "engine": {
                **{name: info[name] for name in _ENGINE_FIELDS},
                "policy_version": self.reference.policy_version,
            },
            "sessions": self.sessions,
            "scored_tokens": self.scored.tokens,
            "seconds": round(self.seconds, 3),
        }


async def audit(
    engine: Engine,
    reference: AuditReference,
    traces: Sequence[Trace],
    calls: Sequence[CallRecord],
    *,
    built_grades: Mapping[str, str] | None = None,
    scorers: Mapping[str, Json] | None = None,
    at_once: int = 4,
    scored: ScoredTokens | None = None,
) -> list[TraceAudit]:
    """Audit all traces of one builder and one session, scoring at most `at_once` sequences at a time.

    `built_grades`: trace id -> the builder's own grade, which an earlier audit may have changed. `scorers`: trace id ->
    the engine that scored a rescored trace. Raise UsageError if a trace is of another model or template than the
    engine's.
    """
    by_id = {call.call_id: call for call in calls}
    scorer_of = scorers or {}
    for trace in traces if not reference.same_model else ():
        if trace.trace_id in scorer_of:
            _require_same_model(scorer_of[trace.trace_id].get("model"), None, reference.info)
            continue
        for span in trace.spans:
            info = by_id[span.call_id].engine
            if span.kind == "sampled" and info is not None:
                _require_same_model(info.model, info.template_hash, reference.info)
    paths = whole_paths(traces)
    fresh = await score_all([paths[trace.trace_id] for trace in traces], engine, at_once, scored)
    found = []
    for trace, values in zip(traces, fresh, strict=True):
        grade = (built_grades or {}).get(trace.trace_id, trace.grade)
        runs = list(_sampled_runs(trace, by_id, scorer_of.get(trace.trace_id)))
        found.append(await asyncio.to_thread(_compare, trace, paths[trace.trace_id], values, runs, reference, grade))
    return found


def whole_paths(traces: Sequence[Trace]) -> dict[str, TokenIds]:
    """Return trace id -> the trace's tokens after those of its parents (builder `tree`), int32 [n].

    Raise StoreError if a parent is missing.
    """
    by_id = {trace.trace_id: trace for trace in traces}
    try:
        return {
            trace.trace_id: trace.token_ids if trace.parent_trace_id is None else trace_path(trace, by_id).token_ids
            for trace in traces
        }
    except ValueError as error:
        raise StoreError(str(error)) from error


def _require_same_model(model: str | None, template_hash: str | None, engine: EngineInfo) -> None:
    """Raise UsageError if the recorded model or template is not the engine's."""
    if model != engine.model:
        raise UsageError(
            f"Some traces are of the model {model!r}, but the engine serves {engine.model!r}: select its own "
            f"traces with --where 'model={engine.model}'. If it is the same model under another name, add --same-model."
        )
    served = engine.template_hash
    if template_hash is None or served is None or _hash_kind(template_hash) != _hash_kind(served):
        return
    if template_hash != served:
        raise UsageError(
            f"The engine's chat template or tokenizer is not the one that traces of {model!r} were recorded "
            "with: serve the model as it was. If only the template was edited, add --same-model."
        )


def _hash_kind(template_hash: str) -> str:
    """Return the kind of a template hash: of the template itself, or of a rendering if the server does not show its
    template."""
    return template_hash.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class SampledRun:
    """Neighbouring sampled tokens of one choice under one policy version: [start, end) of the trace's own tokens."""

    call: CallRecord
    choice: int
    first: int
    """Position of the run's first token in the choice."""
    start: int
    end: int
    version: str | None


def _sampled_runs(trace: Trace, calls: Mapping[str, CallRecord], scorer: Json | None) -> Iterator[SampledRun]:
    """Yield the sampled runs of a trace. `scorer`: the engine that scored a rescored trace."""
    position = 0
    for span in trace.spans:
        here, position = position, position + span.end - span.start
        if span.kind != "sampled":
            continue
        call = calls[span.call_id]
        choice = next(choice for choice in call.choices if choice.index == span.choice)
        changes = policy_versions(call, choice) if scorer is None else ((0, scorer["weight_version"]),)
        ends = [start for start, _ in changes[1:]] + [len(choice.token_ids)]
        for (start, version), end in zip(changes, ends, strict=True):
            low, high = max(start, span.start), min(end, span.end)
            if low < high:
                offset = here - span.start
                yield SampledRun(call, span.choice, low, low + offset, high + offset, version)


def _compare(
    trace: Trace,
    whole: TokenIds,
    fresh: npt.NDArray[np.float64],
    runs: Sequence[SampledRun],
    reference: AuditReference,
    built_grade: str,
) -> TraceAudit:
    """Compare a trace with fresh log-probabilities. `whole`: its tokens after those of its parents; `fresh` (float64
    [n]): the log-probabilities of `whole`."""
    comparison = TraceComparison(trace, whole, fresh, reference)
    for run in runs:
        comparison.add(run)
    findings = comparison.findings()
    grade = built_grade
    if "wrong_mode" in findings or "beyond_tolerance" in findings:
        grade = REJECTED
    elif "not_policy_samples" in findings and grade in TRAINABLE:
        grade = "approximate"
    return TraceAudit(
        trace_id=trace.trace_id,
        built_grade=built_grade,
        grade=grade,
        differences={version: np.concatenate(parts) for version, parts in comparison.differences.items()},
        skipped=comparison.skipped,
        findings=findings,
        worst=tuple(comparison.worst[:_WORST_PER_TRACE]),
    )


class TraceComparison:
    """The comparison of one trace, which adds up its `SampledRun`s."""

    def __init__(
        self, trace: Trace, whole: TokenIds, fresh: npt.NDArray[np.float64], reference: AuditReference
    ) -> None:
        self.differences: dict[str | None, list[Logprobs]] = {}
        self.skipped: Counter[str] = Counter()
        self.worst: list[LogprobDifference] = []
        self._trace, self._whole, self._fresh, self._reference = trace, whole, fresh, reference
        self._offset = len(whole) - len(trace.token_ids)
        self._by_temperature: dict[tuple[LogprobMode, float], LogprobPairs] = {}
        self._off_distribution = False

    def add(self, run: SampledRun) -> None:
        recorded = self._trace.logprobs[run.start : run.end].astype(np.float64)
        fresh = self._fresh[self._offset + run.start : self._offset + run.end]
        mode: LogprobMode = "raw" if self._trace.rescored else run.call.logprob_mode
        own_distribution = self._trace.rescored or not is_off_distribution(replace(run.call, logprob_mode="raw"))
        self._off_distribution |= mode == "raw" and not own_distribution
        if (reason := _incomparable(run, self._reference)) is not None:
            self.skipped[reason] += len(recorded)
            return
        known = np.isfinite(fresh) & np.isfinite(recorded)
        for missing in np.flatnonzero(~known):
            beyond = self._offset + run.start + int(missing) >= self._reference.info.context_length - 1
            self.skipped["beyond_context" if beyond else "no_fresh_logprob"] += 1
        temperature = run.call.sampling.get("temperature")
        if not own_distribution and temperature:
            pairs = self._by_temperature.setdefault((mode, float(temperature)), LogprobPairs())
            pairs.add(recorded[known], fresh[known])
        if mode == "processed" and not own_distribution:
            self.skipped["processed_sampling"] += int(np.count_nonzero(known))
            return
        sizes = np.abs(recorded - fresh)[known].astype(np.float32)
        self.differences.setdefault(run.version, []).append(sizes)
        largest = np.flatnonzero(known)[np.argsort(-sizes, kind="stable")[:_WORST_PER_TRACE]]
        self.worst += [self._difference(run, int(index), recorded[index], fresh[index]) for index in largest]
        self.worst.sort(key=lambda difference: -difference.size)

    def _difference(self, run: SampledRun, index: int, recorded: float, fresh: float) -> LogprobDifference:
        """Describe the token at `index` of a run."""
        position = self._offset + run.start + index
        return LogprobDifference(
            trace_id=self._trace.trace_id,
            call_id=run.call.call_id,
            choice=run.choice,
            position=run.first + index,
            token_id=int(self._whole[position]),
            recorded=float(recorded),
            fresh=float(fresh),
            policy_version=run.version,
            before=tuple(self._whole[max(0, position - CONTEXT_TOKENS) : position].tolist()),
        )

    def findings(self) -> dict[str, str]:
        found: dict[str, str] = {}
        tolerance = self._reference.tolerance
        for (mode, temperature), pairs in self._by_temperature.items():
            actual = wrong_mode(*pairs.arrays(), mode, temperature, tolerance)
            if actual is not None:
                found["wrong_mode"] = f"recorded as {mode}, but at temperature {temperature:g} the numbers are {actual}"
        if self.worst and self.worst[0].size > tolerance:
            found["beyond_tolerance"] = f"largest difference {self.worst[0].size:.3g}, tolerance {tolerance:g}"
        if self._off_distribution:
            found["not_policy_samples"] = "raw log-probabilities under a temperature or a cut distribution"
        return found


def _incomparable(run: SampledRun, reference: AuditReference) -> str | None:
    if run.call.engine is None:
        return "unknown_engine"
    if run.version is None or reference.policy_version is None:
        return None  # an unknown version is compared: the numbers show whether the weights are the same
    return None if run.version == reference.policy_version else "policy_version"


@dataclass(slots=True)
class LogprobPairs:
    """Recorded and fresh log-probabilities of the same tokens."""

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
    """Return the mode of the numbers (float64 [n] each) if it is not `mode`; None if they fit, or do not show it.

    With z the logits, raw is log softmax(z) and processed log softmax(z / T) = raw / T - log sum p^(1/T). That sum is
    above 1 for T > 1 and below it for T < 1 (cutting the distribution makes it smaller still), so for processed numbers
    recorded - raw / T has a known sign, although the rest of the distribution is unknown.
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
