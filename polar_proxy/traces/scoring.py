"""Teacher-forced log-probabilities of whole sequences from an engine, and traces rescored with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.sequences import MISSING_LOGPROB, begins_with
from polar_proxy.traces.builders import BuildResult
from polar_proxy.traces.certificate import ScorerIdentity
from polar_proxy.traces.grades import CANONICAL, RESCORED, grade_of
from polar_proxy.types import Logprobs, TokenIds, Trace


@dataclass(slots=True)
class ScoredTokens:
    """The number of tokens that the engine scored."""

    tokens: int = 0


async def score_all(
    sequences: Sequence[TokenIds], engine: Engine, at_once: int = 4, scored: ScoredTokens | None = None
) -> list[npt.NDArray[np.float64]]:
    """Return `score_sequence` of each sequence (int32 [n]), at most `at_once` at a time.

    A sequence that is the beginning of another takes its values from that one: the causal mask makes them equal.
    """
    containing = find_containing(sequences)
    gate = asyncio.Semaphore(at_once)

    async def score(ids: TokenIds) -> npt.NDArray[np.float64]:
        async with gate:
            values = await score_sequence(engine, ids)
        if scored is not None:
            scored.tokens += len(ids)
        return values

    wanted = sorted(set(containing))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {index: group.create_task(score(sequences[index])) for index in wanted}
    except ExceptionGroup as failed:  # the first error is enough: the other tasks were cancelled or failed alike
        raise failed.exceptions[0] from failed
    return [tasks[index].result()[: len(ids)] for ids, index in zip(sequences, containing, strict=True)]


async def score_sequence(engine: Engine, ids: TokenIds) -> npt.NDArray[np.float64]:
    """Return the log-probability of each token after all before it, float64 [n].

    NaN for the first token, for tokens without a value from the engine, and after the end of its context.
    """
    out = np.full(len(ids), np.nan)
    if len(ids) < 2:
        return out
    taken = ids
    try:
        values = await engine.score(taken.tolist())
    except RequestError as error:
        limit = engine.info.context_length
        if error.code != "context_length_exceeded" or not 2 < limit <= len(ids):
            raise
        taken = ids[: limit - 1]
        values = await engine.score(taken.tolist())
    out[1 : len(taken)] = values
    return out


def find_containing(sequences: Sequence[TokenIds]) -> list[int]:
    """Return for each sequence (int32 [n]) the index of a longest one that begins with it, or its own index."""
    by_length = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    containing = list(range(len(sequences)))
    longest: list[int] = []
    for index in by_length:
        found = next((other for other in longest if begins_with(sequences[other], sequences[index])), None)
        if found is None:
            longest.append(index)
        else:
            containing[index] = found
    return containing


async def rescore(build: BuildResult, engine: Engine) -> BuildResult:
    """Return the build with the engine's log-probabilities in the traces where drift was joined (`on_drift = rescore`).

    Their sampled positions get the teacher-forced log-probabilities (raw, of the whole sequence) in place of the
    recorded ones; their grade gets the reason `rescored`. Other traces stay as they are. Raise EngineError if the
    engine gives no value for a sampled token, and every error of its `score`.
    """
    traces: list[Trace] = []
    reasons = dict(build.grade_reasons)
    for trace in build.traces:
        if CANONICAL in reasons[trace.trace_id]:
            reasons[trace.trace_id] = tuple(sorted({*reasons[trace.trace_id], RESCORED}))
            logprobs = await _rescored_logprobs(trace, engine)
            trace = replace(trace, logprobs=logprobs, rescored=True, grade=grade_of(reasons[trace.trace_id]))
        traces.append(trace)
    if not any(trace.rescored for trace in traces):
        return build
    scorer = ScorerIdentity(
        engine=engine.info.engine,
        version=engine.info.version,
        model=engine.info.model,
        weight_version=await engine.weight_version(),
    )
    return replace(build, traces=tuple(traces), grade_reasons=reasons, rescored_by=scorer)


async def _rescored_logprobs(trace: Trace, engine: Engine) -> Logprobs:
    values = await engine.score(trace.token_ids.tolist())
    if len(values) != len(trace.token_ids) - 1:
        raise EngineError(f"The engine scored {len(values)} of {len(trace.token_ids) - 1} tokens.")
    # The first token has nothing before it; a joined trace begins with context.
    logprobs: Logprobs = np.array([np.nan, *values], dtype=np.float32)
    logprobs[trace.loss_mask == 0] = np.nan
    sampled = logprobs[trace.loss_mask == 1]
    if not (np.isfinite(sampled) & (sampled > MISSING_LOGPROB)).all():
        raise EngineError(f"The engine gave no log-probability for some sampled tokens of {trace.trace_id}.")
    return logprobs
