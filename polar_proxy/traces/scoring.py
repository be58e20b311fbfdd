"""Teacher-forced log-probabilities of whole sequences. What sequences have in common goes through the engine once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar_proxy.engines.base import Engine
from polar_proxy.errors import RequestError
from polar_proxy.traces.tokens import begins_with
from polar_proxy.types import TokenIds


@dataclass(slots=True)
class ScoredTokens:
    """How many tokens went through the engine."""

    tokens: int = 0


async def score_all(
    sequences: Sequence[TokenIds], engine: Engine, at_once: int = 4, scored: ScoredTokens | None = None
) -> list[npt.NDArray[np.float64]]:
    """`score_sequence` of each sequence (int32 [n]), at most `at_once` at a time. One that begins another takes its
    numbers from that."""
    within = cover(sequences)
    gate = asyncio.Semaphore(at_once)

    async def one(ids: TokenIds) -> npt.NDArray[np.float64]:
        async with gate:
            values = await score_sequence(engine, ids)
        if scored is not None:
            scored.tokens += len(ids)
        return values

    wanted = sorted(set(within))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {index: group.create_task(one(sequences[index])) for index in wanted}
    except ExceptionGroup as failed:  # of several the first is as good as any: the others were cancelled or fail alike
        raise failed.exceptions[0] from failed
    return [tasks[index].result()[: len(ids)] for ids, index in zip(sequences, within, strict=True)]


async def score_sequence(engine: Engine, ids: TokenIds) -> npt.NDArray[np.float64]:
    """Log-probability of each token behind all before it, float64 [n]; nan for the first, for what the engine gave
    none for, and for what stands beyond its context."""
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


def cover(sequences: Sequence[TokenIds]) -> list[int]:
    """For each sequence (int32 [n]) the index of the longest one found that begins with it; else its own.

    The causal mask makes the log-probabilities of a prefix those of the same tokens in the longer sequence.
    """
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    within = list(range(len(sequences)))
    whole: list[int] = []
    for index in order:
        found = next((other for other in whole if begins_with(sequences[other], sequences[index])), None)
        if found is None:
            whole.append(index)
        else:
            within[index] = found
    return within
