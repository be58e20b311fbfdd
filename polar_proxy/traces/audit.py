"""Audit: compare the recorded log-probabilities of traces with those of a fresh, teacher-forced pass.

Promises, each with a test:

* Only log-probabilities of sampled tokens are compared. The engine scores each token after all tokens
  before it; in a `tree`, these are the tokens of the whole path from the root. A token that cannot be compared is
  counted with its reason, never as a difference of 0.
* A trace is `rejected` if a difference exceeds the tolerance, or if its log-probabilities are not of the mode (raw or
  processed) that the record states. A trace becomes `approximate` if its log-probabilities are raw, but a temperature,
  top_p, a penalty, ... changed the distribution. An audit never improves the grade that the builder gave. An audit
  without findings withdraws an earlier audit's rejection.
* A sequence that is the beginning of a longer one is not scored separately.

Reasons for which a token is not compared: `policy_version` (sampled by other weights than the engine has loaded),
`processed_sampling` (the record is of a distribution that top_p, a penalty, ... changed, and a fresh pass cannot give
this distribution), `beyond_context` (after the end of the engine's context), `no_fresh_logprob` (the engine returned no
value), `unknown_engine` (the record does not name the engine).
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.sequences import trace_path
from polar_proxy.traces.grades import REJECTED, TRAINABLE
from polar_proxy.traces.scoring import Scorer
from polar_proxy.types import AnswerSampling, CallRecord, EngineInfo, Json, LogprobMode, Logprobs, TokenIds, Trace

TOLERANCE = 1e-2
"""Default tolerance, in nats. An error of this size changes an importance ratio by one per cent, far less than any clip
range. In fp32, decode and prefill of the same tokens differ by 1e-5 to 1e-3; in bf16 by more (docs/guide/data.md)."""
CONTEXT_TOKENS = 24
"""Number of tokens that the report shows before each of the tokens that differ most."""
UNKNOWN = "unknown"
"""The key under which traces without a harness, and tokens without a policy version, are counted."""
_WORST_PER_TRACE = 3
_WORST_IN_REPORT = 10
_INFORMATIVE_BELOW = -0.1
"""Only tokens with a log-probability below this (nats) show whether values are raw or processed. For a token that is
nearly certain, both values are near 0."""
_MIN_INFORMATIVE = 16
"""Minimum number of such tokens. With fewer, audit does not decide whether values are raw or processed."""
_FITTING_SHARE = 0.95
"""Values count as raw if at least this share of the tokens below `_INFORMATIVE_BELOW` agrees with raw values. The same
share applies to processed values."""

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AuditReference:
    """The engine with which traces are compared, and the tolerance of the comparison."""

    info: EngineInfo
    policy_version: str | None
    tolerance: float = TOLERANCE
    same_model: bool = False
    """True if the caller guarantees that the engine serves the recorded model, even if its name differs."""

    def engine(self) -> Json:
        return {"engine": self.info.engine, "version": self.info.version, "model": self.info.model}


@dataclass(frozen=True, slots=True)
class LogprobDifference:
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
    """Ids of the tokens before the compared one."""

    @property
    def size(self) -> float:
        return abs(self.recorded - self.fresh)

    def to_json(self) -> Json:
        names = ("call_id", "choice", "position", "token_id", "recorded", "fresh")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class DifferenceStats:
    """Differences of many tokens. `largest` is None if nothing was compared."""

    traces: int = 0
    tokens: int = 0
    largest: float | None = None
    total: float = 0.0

    def add(self, differences: Logprobs) -> None:
        if len(differences):
            self.tokens += len(differences)
            self.largest = max(self.largest or 0.0, float(differences.max()))
            self.total += float(differences.sum(dtype=np.float64))

    def to_json(self) -> Json:
        mean = self.total / self.tokens if self.tokens else None
        return {"tokens": self.tokens, "max_abs_diff": self.largest, "mean_abs_diff": mean}


@dataclass(slots=True)
class AuditReport:
    reference: AuditReference
    all: DifferenceStats = field(default_factory=DifferenceStats)
    grades: Counter[str] = field(default_factory=Counter)
    by_harness: defaultdict[str, DifferenceStats] = field(default_factory=lambda: defaultdict(DifferenceStats))
    by_policy_version: defaultdict[str, DifferenceStats] = field(default_factory=lambda: defaultdict(DifferenceStats))
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of traces in which no token was compared. Each trace is counted under the reason that excluded the
    largest number of its tokens. Sessions without traces are counted as `not_built`."""
    skipped_tokens: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, str] = field(default_factory=dict)
    """trace id -> its findings in words, or the remark that its builder rejected the trace."""
    worst: list[tuple[LogprobDifference, str]] = field(default_factory=list)
    """The tokens that differ most, largest first, each with its harness."""
    scored_tokens: int = 0
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
        self.all.traces += 1
        self.by_harness[harness].traces += 1
        for version, differences in audit.differences.items():
            of_version = self.by_policy_version[version or UNKNOWN]
            of_version.traces += 1
            for stats in (self.all, self.by_harness[harness], of_version):
                stats.add(differences)
        self.worst += [(difference, harness) for difference in audit.worst]
        self.worst.sort(key=lambda entry: -entry[0].size)
        del self.worst[_WORST_IN_REPORT:]

    def to_json(self, texts: Sequence[tuple[str, str]]) -> Json:
        """Return the report as JSON. `texts`: for each entry of `worst`, the text of its token and the text of the
        tokens before it."""

        def described(stats: DifferenceStats) -> Json:
            return {"traces": stats.traces, **stats.to_json()}

        return {
            **described(self.all),
            "grades": dict(self.grades),
            "by_harness": {name: described(stats) for name, stats in self.by_harness.items()},
            "by_policy_version": {name: described(stats) for name, stats in self.by_policy_version.items()},
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
            "engine": {**self.reference.engine(), "policy_version": self.reference.policy_version},
            "sessions": self.sessions,
            "scored_tokens": self.scored_tokens,
            "seconds": round(self.seconds, 3),
        }


async def audit(
    scorer: Scorer,
    reference: AuditReference,
    traces: Sequence[Trace],
    calls: Sequence[CallRecord],
    certificates: Mapping[str, Json | None] | None = None,
) -> list[TraceAudit]:
    """Audit the traces that one builder made of one session.

    `certificates`: trace id -> stored certificate. If a trace was rescored, its certificate names the engine that
    scored the trace. If a trace was audited before, its certificate names the grade that the builder gave. Raises
    UsageError if a trace was sampled with another model or template than the engine has, unless
    `reference.same_model` is True. Raises StoreError if a parent of a trace is missing.
    """
    by_id = {call.call_id: call for call in calls}
    stored = {trace.trace_id: (certificates or {}).get(trace.trace_id) or {} for trace in traces}
    for trace in traces if not reference.same_model else ():
        _require_same_model(trace, by_id, stored[trace.trace_id].get("rescored"), reference.info)
    by_trace = {trace.trace_id: trace for trace in traces}
    try:
        paths = [trace_path(trace, by_trace).token_ids for trace in traces]
    except ValueError as error:
        raise StoreError(str(error)) from error
    fresh: list[dict[float, _Values]] = [{1.0: values} for values in await scorer.score_all(paths)]
    temperatures = [{scored_temperature(sampling, trace.rescored) for sampling in trace.sampling} for trace in traces]
    for temperature in sorted(set().union(*temperatures) - {1.0}):
        needed = [index for index, own in enumerate(temperatures) if temperature in own]
        scored = await scorer.score_all([paths[index] for index in needed], temperature)
        for index, values in zip(needed, scored, strict=True):
            fresh[index][temperature] = values

    def compare() -> list[TraceAudit]:
        found = []
        for trace, path, values in zip(traces, paths, fresh, strict=True):
            kept = stored[trace.trace_id]
            built_grade = (kept.get("audit") or {}).get("built_grade", trace.grade)
            one = TraceAudit(trace, path, values, reference, built_grade)
            for run in _sampled_runs(trace, by_id, kept.get("rescored")):
                one.add(run)
            one.conclude()
            found.append(one)
        return found

    return await asyncio.to_thread(compare)


def scored_temperature(sampling: AnswerSampling, rescored: bool) -> float:
    """Return the temperature at which fresh log-probabilities can be compared with the recorded ones of an answer.
    `rescored`: True if the log-probabilities of the trace were not recorded with the answers, but computed by an engine
    later, at temperature 1."""
    if rescored or sampling.logprob_mode == "raw" or sampling.changes:
        return 1.0
    return sampling.temperature or 1.0


def _require_same_model(
    trace: Trace, calls: Mapping[str, CallRecord], rescored_by: Json | None, engine: EngineInfo
) -> None:
    """Raise UsageError if the trace was sampled (or rescored) with another model or template than the engine has."""
    models: set[tuple[str, str | None]] = set()
    if rescored_by is not None:
        models.add((rescored_by["model"], None))
    else:
        infos = (calls[span.call_id].engine for span in trace.spans if span.kind == "sampled")
        models |= {(info.model, info.template_hash) for info in infos if info is not None}
    for model, template_hash in models:
        if model != engine.model:
            raise UsageError(
                f"Some traces are of the model {model!r}, but the engine serves {engine.model!r}: select only traces "
                f"of the engine's model with --where 'model={engine.model}'. If it is the same model under another "
                "name, add --same-model."
            )
        served = engine.template_hash
        # A hash is of the template itself, or of a rendering if the server does not show its template.
        comparable = template_hash and served and template_hash.rpartition(":")[0] == served.rpartition(":")[0]
        if comparable and template_hash != served:
            raise UsageError(
                f"Traces of {model!r} were recorded with another chat template or tokenizer than the engine's: serve "
                "the model with the template and tokenizer of the recording. If only the template was edited, add "
                "--same-model."
            )


@dataclass(frozen=True, slots=True)
class SampledRun:
    """Consecutive sampled tokens of one choice with one policy version. The run is [start, end) in the trace's own
    tokens."""

    call: CallRecord
    choice: int
    first: int
    """Position of the run's first token in the choice."""
    start: int
    end: int
    version: str | None
    sampling: AnswerSampling


def _sampled_runs(trace: Trace, calls: Mapping[str, CallRecord], rescored_by: Json | None) -> Iterator[SampledRun]:
    position = 0
    samplings = iter(trace.sampling)
    for span in trace.spans:
        if span.kind == "sampled":
            call, sampling = calls[span.call_id], next(samplings)
            versions = sampling.versions if rescored_by is None else ((0, rescored_by["weight_version"]),)
            ends = [start for start, _ in versions[1:]] + [span.end]
            for (start, version), end in zip(versions, ends, strict=True):
                yield SampledRun(call, span.choice, start, position + start, position + end, version, sampling)
        position += span.end - span.start


class TraceAudit:
    """The comparison of one trace with fresh log-probabilities: `add` each `SampledRun`, then `conclude`."""

    def __init__(
        self,
        trace: Trace,
        path: TokenIds,
        fresh: Mapping[float, _Values],
        reference: AuditReference,
        built_grade: str,
    ) -> None:
        """`path`: the tokens of the trace's parents, then its own; `fresh`: temperature -> log-probabilities of `path`
        (float64 [n]), for temperature 1 and every `scored_temperature` of the trace."""
        self.trace_id = trace.trace_id
        self.built_grade = self.grade = built_grade
        self.differences: dict[str | None, Logprobs] = {}
        """|recorded - fresh|, float32 [number of compared tokens], by policy version."""
        self.skipped: Counter[str] = Counter()
        """Sampled tokens that were not compared, by reason."""
        self.findings: dict[str, str] = {}
        """Finding (beyond_tolerance, wrong_mode or not_policy_samples) -> its description."""
        self.worst: list[LogprobDifference] = []
        self._trace, self._path, self._fresh, self._reference = trace, path, fresh, reference
        self._pairs: dict[tuple[LogprobMode, float], list[_Values]] = {}
        """(log-probability mode, temperature) of the answers -> arrays [2, n]: the recorded values in row 0, and the
        fresh values at temperature 1 in row 1."""

    @property
    def tokens(self) -> int:
        return sum(len(values) for values in self.differences.values())

    def add(self, run: SampledRun) -> None:
        rescored, sampling = self._trace.rescored, run.sampling
        mode: LogprobMode = "raw" if rescored else sampling.logprob_mode
        own_distribution = rescored or (sampling.temperature == 1.0 and not sampling.changes)
        if mode == "raw" and not own_distribution:
            self.findings["not_policy_samples"] = "raw log-probabilities under a temperature or a cut distribution"
        recorded = self._trace.logprobs[run.start : run.end].astype(np.float64)
        if (reason := _incomparable(run, self._reference)) is not None:
            self.skipped[reason] += len(recorded)
            return
        begin = self._trace.branch_at + run.start
        in_path = slice(begin, begin + len(recorded))
        if sampling.temperature and not own_distribution:
            raw = self._fresh[1.0][in_path]
            both = np.isfinite(raw) & np.isfinite(recorded)
            pair = np.stack([recorded[both], raw[both]])
            self._pairs.setdefault((mode, float(sampling.temperature)), []).append(pair)
        fresh = self._fresh[scored_temperature(sampling, rescored)][in_path]
        known = np.isfinite(fresh) & np.isfinite(recorded)
        for missing in np.flatnonzero(~known):
            beyond = begin + int(missing) >= self._reference.info.context_length - 1
            self.skipped["beyond_context" if beyond else "no_fresh_logprob"] += 1
        if mode == "processed" and (sampling.changes or not sampling.temperature):
            self.skipped["processed_sampling"] += int(np.count_nonzero(known))
        else:
            self._add_differences(run, recorded, fresh, np.flatnonzero(known))

    def _add_differences(
        self, run: SampledRun, recorded: _Values, fresh: _Values, compared: npt.NDArray[np.intp]
    ) -> None:
        """Add the differences of the tokens `compared` (indices within the run), and keep the largest ones."""
        sizes = np.abs(recorded - fresh)[compared].astype(np.float32)
        earlier = self.differences.get(run.version)
        self.differences[run.version] = sizes if earlier is None else np.concatenate([earlier, sizes])
        largest = compared[np.argsort(-sizes, kind="stable")[:_WORST_PER_TRACE]].tolist()
        self.worst += [self._difference(run, index, recorded[index], fresh[index]) for index in largest]
        self.worst.sort(key=lambda difference: -difference.size)
        del self.worst[_WORST_PER_TRACE:]

    def _difference(self, run: SampledRun, index: int, recorded: np.float64, fresh: np.float64) -> LogprobDifference:
        """Describe the difference between the recorded and the fresh value of token `index` of a run."""
        position = self._trace.branch_at + run.start + index
        return LogprobDifference(
            trace_id=self.trace_id,
            call_id=run.call.call_id,
            choice=run.choice,
            position=run.first + index,
            token_id=int(self._path[position]),
            recorded=float(recorded),
            fresh=float(fresh),
            policy_version=run.version,
            before=tuple(self._path[max(0, position - CONTEXT_TOKENS) : position].tolist()),
        )

    def conclude(self) -> None:
        tolerance = self._reference.tolerance
        wrong = []
        for (mode, temperature), pairs in self._pairs.items():
            recorded, fresh = np.concatenate(pairs, axis=1)
            if (actual := wrong_mode(recorded, fresh, mode, temperature, tolerance)) is not None:
                wrong.append(f"recorded as {mode}, but at temperature {temperature:g} the numbers are {actual}")
        if wrong:
            self.findings["wrong_mode"] = "; ".join(wrong)
        if self.worst and self.worst[0].size > tolerance:
            text = f"largest difference {self.worst[0].size:.3g}, tolerance {tolerance:g}"
            self.findings["beyond_tolerance"] = text
        if "wrong_mode" in self.findings or "beyond_tolerance" in self.findings:
            self.grade = REJECTED
        elif "not_policy_samples" in self.findings and self.grade in TRAINABLE:
            self.grade = "approximate"

    def to_json(self, now: float) -> Json:
        """Return the certificate's `audit` field. `now`: seconds since the epoch."""
        stats = DifferenceStats()
        for values in self.differences.values():
            stats.add(values)
        return {
            "at": now,
            "engine": self._reference.engine(),
            "policy_version": self._reference.policy_version,
            "tolerance": self._reference.tolerance,
            "built_grade": self.built_grade,
            **stats.to_json(),
            "skipped_tokens": dict(self.skipped),
            "findings": self.findings,
            "worst": self.worst[0].to_json() if self.worst else None,
        }


def _incomparable(run: SampledRun, reference: AuditReference) -> str | None:
    if run.call.engine is None:
        return "unknown_engine"
    if run.version is None or reference.policy_version is None:
        return None  # an unknown version is compared: the numbers show whether the weights are the same
    return None if run.version == reference.policy_version else "policy_version"


def wrong_mode(
    recorded: _Values, fresh: _Values, mode: LogprobMode, temperature: float, tolerance: float
) -> LogprobMode | None:
    """Return the actual mode of the `recorded` log-probabilities (float64 [n]); None if `mode` may be right.

    `fresh`, float64 [n]: the same tokens' log-probabilities at temperature 1. Recorded values are raw if they equal
    `fresh`. Otherwise the sign of `recorded - fresh / T` decides. With the logits z and p = softmax(z), processed
    values are log softmax(z / T) = log p / T - log sum p^(1/T). So the values count as processed if the difference is
    negative and T > 1, or positive and T < 1. (top_p and the like make the sum smaller. For T > 1, this may change the
    sign.)
    """
    informative = fresh < _INFORMATIVE_BELOW
    if np.count_nonzero(informative) < _MIN_INFORMATIVE or abs(1 / temperature - 1) < 0.1:
        return None
    recorded, fresh = recorded[informative], fresh[informative]
    raw = float(np.mean(np.abs(recorded - fresh) <= tolerance)) >= _FITTING_SHARE
    if mode == "processed":
        return "raw" if raw else None
    rest = recorded - fresh / temperature
    processed = float(np.mean(rest <= tolerance if temperature > 1 else rest >= -tolerance)) >= _FITTING_SHARE
    return "processed" if processed and not raw else None
