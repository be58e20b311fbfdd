"""An audit of what the store holds, one session at a time: memory stays that of one rollout."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, UsageError
from polar_proxy.store import Store
from polar_proxy.store.rescores import RESCORED_BUILDER, apply_rescores
from polar_proxy.traces.audit import AuditReference, DifferenceStats, LogprobDifference, TraceAudit, audit
from polar_proxy.traces.scoring import ScoredTokens
from polar_proxy.traces.targets import SessionTarget
from polar_proxy.types import Json

UNKNOWN = "unknown"
"""Where the record names no harness (a session without a rollout), or no policy version."""


@dataclass(slots=True)
class AuditReport:
    """What an audit found. `skipped` counts traces by the reason for which nothing in them was compared, and sessions
    that have none (`not_built`)."""

    against: AuditReference
    all: DifferenceStats = field(default_factory=DifferenceStats)
    grades: Counter[str] = field(default_factory=Counter)
    by_harness: defaultdict[str, DifferenceStats] = field(default_factory=lambda: defaultdict(DifferenceStats))
    by_policy_version: defaultdict[str, DifferenceStats] = field(default_factory=lambda: defaultdict(DifferenceStats))
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_tokens: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    said: dict[str, str] = field(default_factory=dict)
    """Trace id -> what was found, of traces that were refused."""
    worst: list[tuple[LogprobDifference, str]] = field(default_factory=list)
    """The tokens that differ most, largest first, each with its harness."""
    scored: ScoredTokens = field(default_factory=ScoredTokens)
    sessions: int = 0
    seconds: float = 0.0
    keep: int = 10

    def add(self, audited: TraceAudit, harness: str) -> None:
        self.skipped_tokens.update(audited.skipped)
        if not audited.tokens and audited.grade != "refused":
            self.skipped[max(audited.skipped, key=audited.skipped.__getitem__, default="nothing_sampled")] += 1
            return
        self.grades[audited.grade] += 1
        self.findings.update(audited.findings.keys())
        if audited.grade == "refused":
            self.said[audited.trace_id] = "; ".join(audited.findings.values()) or "refused by its builder"
        for tally in (self.all, self.by_harness[harness]):
            tally.traces += 1
        for version, differences in audited.differences.items():
            tallied = self.by_policy_version[version or UNKNOWN]
            tallied.traces += 1
            for tally in (self.all, self.by_harness[harness], tallied):
                tally.add(differences)
        self.worst += [(difference, harness) for difference in audited.worst]
        self.worst.sort(key=lambda entry: -entry[0].size)
        del self.worst[self.keep :]

    def to_json(self, texts: Sequence[tuple[str, str]]) -> Json:
        """`texts`: for each of `worst` the text of the token and of what stands before it."""
        whole = self.all.to_json()
        return {
            **whole,
            "grades": dict(self.grades),
            "by_harness": {name: tally.to_json() for name, tally in self.by_harness.items()},
            "by_policy_version": {name: tally.to_json() for name, tally in self.by_policy_version.items()},
            "skipped": dict(self.skipped),
            "skipped_tokens": dict(self.skipped_tokens),
            "findings": dict(self.findings),
            "refused": self.said,
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
            "tolerance": self.against.tolerance,
            "engine": {
                **{name: value for name, value in asdict(self.against.info).items() if name in _ENGINE},
                "policy_version": self.against.policy_version,
            },
            "sessions": self.sessions,
            "scored_tokens": self.scored.tokens,
            "seconds": round(self.seconds, 3),
        }


_ENGINE = ("engine", "version", "model")


async def audit_store(
    store: Store,
    engine: Engine,
    against: AuditReference,
    targets: Sequence[SessionTarget],
    *,
    builder: str = "merged",
    at_once: int = 4,
    progress: Callable[[AuditReport], object] = lambda report: None,
) -> AuditReport:
    """Audit the traces that `builder` made of the targets, and write grade and figures into each trace.

    Raises UsageError where the engine cannot score, serves another model, or a trace was built without a certificate;
    EngineError where the weights change meanwhile.
    """
    if "score" not in engine.info.capabilities:
        raise UsageError(
            f"The engine {engine.info.engine} gives no log-probabilities of a given sequence: audit with vllm or local."
        )
    report = AuditReport(against)
    started = time.monotonic()
    loaded = await engine.weight_version()
    for target in targets:
        await _session(store, engine, target, builder, at_once, report)
        report.sessions += 1
        report.seconds = time.monotonic() - started
        progress(report)
        if (now := await engine.weight_version()) != loaded:
            raise EngineError(f"The engine's weights changed from version {loaded} to {now} during the audit.")
    return report


async def _session(
    store: Store, engine: Engine, target: SessionTarget, builder: str, at_once: int, report: AuditReport
) -> None:
    traces = await store.traces.find(session_id=target.session_id, builder=builder)
    if not traces:
        report.skipped["not_built"] += 1
        return
    certificates = await store.traces.certificates(session_id=target.session_id, builder=builder)
    built = {
        trace_id: str(audited["built_grade"])
        for trace_id, certificate in certificates.items()
        if certificate is not None and (audited := certificate.get("audit"))
    }
    scorers = {trace_id: told["rescored"] for trace_id, told in certificates.items() if told and told.get("rescored")}
    calls = await store.calls.of_session(target.session_id)
    if builder == RESCORED_BUILDER:
        calls = apply_rescores(calls, await store.rescores.of_session(target.session_id))
    found = await audit(
        engine,
        report.against,
        traces,
        calls,
        built_grades=built,
        scorers=scorers,
        at_once=at_once,
        scored=report.scored,
    )
    for audited in found:
        if audited.tokens or audited.grade == "refused":
            await store.traces.set_audit(audited.trace_id, audited.grade, audited.to_json(report.against, time.time()))
        report.add(audited, target.harness or UNKNOWN)
