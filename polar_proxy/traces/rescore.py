"""`on_drift = rescore`: the log-probabilities of sequences as they will be trained, from an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from polar_proxy.errors import EngineError
from polar_proxy.traces.grades import CANONICAL, RESCORED, grade_of
from polar_proxy.traces.trace_builder import BuildResult
from polar_proxy.types import EngineInfo, Logprobs, Trace


class ScoringEngine(Protocol):
    """What of an engine is used here (`engines/base.py`)."""

    @property
    def info(self) -> EngineInfo: ...

    async def score(self, token_ids: list[int]) -> list[float]: ...

    async def weight_version(self) -> str | None: ...


async def rescore(built: BuildResult, engine: ScoringEngine) -> BuildResult:
    """The same traces; in those where drift was joined, the sampled positions carry the engine's teacher-forced
    log-probabilities (raw, of the whole sequence) instead of the recorded ones. They are `rescored` and marked so.

    Traces without joined drift keep what was told at sampling. Raises EngineError where the engine gives no number for
    a sampled token, and whatever its `score` raises.
    """
    traces: list[Trace] = []
    why = dict(built.why)
    for trace in built.traces:
        if CANONICAL in why[trace.trace_id]:
            why[trace.trace_id] = tuple(sorted({*why[trace.trace_id], RESCORED}))
            logprobs = await _scored(trace, engine)
            trace = replace(trace, logprobs=logprobs, rescored=True, grade=grade_of(why[trace.trace_id]))
        traces.append(trace)
    if not any(trace.rescored for trace in traces):
        return built
    info = engine.info
    by = {
        "engine": info.engine,
        "version": info.version,
        "model": info.model,
        "weight_version": await engine.weight_version(),
    }
    return replace(built, traces=tuple(traces), why=why, rescored_by=by)


async def _scored(trace: Trace, engine: ScoringEngine) -> Logprobs:
    told = await engine.score(trace.token_ids.tolist())
    if len(told) != len(trace.token_ids) - 1:
        raise EngineError(f"The engine scored {len(told)} of {len(trace.token_ids) - 1} tokens.")
    # The first token has nothing before it; a joined trace begins with context.
    scores: Logprobs = np.array([np.nan, *told], dtype=np.float32)
    scores[trace.loss_mask == 0] = np.nan
    if not np.isfinite(scores[trace.loss_mask == 1]).all():
        raise EngineError(f"The engine gave no log-probability for some sampled tokens of {trace.trace_id}.")
    return scores
