"""New weights into the engine that samples, and the proof that they arrived.

After each sync engine and trainer both score a fixed prompt (the probe), and three things are checked:

* The two differ by less than a tolerance.
* The engine is nearer to the trainer's current weights than to those before the sync. Small updates hide within any
  tolerance, so an engine that silently kept the old weights would pass the first check.
* The engine is not much further from the trainer than at the first sync, compared with how far the weights moved.
  Otherwise it loaded only a part of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, TrainingError
from polar_proxy.types import Json

PROBE_TOKENS = 48


class WeightSync(Protocol):
    """Sends weights to one kind of engine."""

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        """Send the weights, and return once all new tokens are sampled with them. Raises TrainingError."""
        ...


class AcceptsWeights(Protocol):
    """The part of `LocalEngine` that a sync uses."""

    async def load_weights(self, source: Any, version: str) -> None: ...


class LocalSync:
    """Copies the weights in memory between two of the engine's decoding steps.

    Answers in flight continue with the new weights; the version of each token is recorded.
    """

    def __init__(self, engine: AcceptsWeights) -> None:
        self._engine = engine

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        try:
            await self._engine.load_weights(weights, version)
        except EngineError as error:
            raise TrainingError(f"the engine did not load the weights of version {version}: {error}") from error


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Differences of engine and trainer in nats over the tokens of the probe."""

    largest: float
    mean: float
    moved: float | None
    """Mean change of the trainer's own values since the last sync; None at the first."""

    def to_json(self) -> Json:
        return asdict(self)


def probe_ids(vocab_size: int, count: int = PROBE_TOKENS) -> list[int]:
    """Return the same random tokens in every run. Random text is unlikely, so its log-probabilities change much with
    the weights."""
    return [int(token) for token in np.random.default_rng(0).integers(0, vocab_size, count)]


async def probe(
    engine: Engine,
    ids: Sequence[int],
    logprobs: Sequence[float],
    last_logprobs: Sequence[float] | None,
    tolerance: float,
    noise: float | None = None,
) -> ProbeResult:
    """Compare the engine's log-probabilities of ids[1:] with the trainer's current ones and those of the last sync.

    `noise` is the mean difference at the first sync, when both have the same weights and only compute differently.
    Raises TrainingError if the engine does not have the trainer's weights.
    """
    try:
        scored = np.array(await engine.score(ids))
    except EngineError as error:
        raise TrainingError(f"the engine cannot score the probe after the sync: {error}") from error
    gaps = np.abs(scored - np.array(logprobs))
    largest, mean = float(gaps.max()), float(gaps.mean())
    if not largest <= tolerance:  # NaN fails too
        raise TrainingError(
            f"after the sync engine and trainer differ by up to {largest:.3g} nats on the probe (allowed: "
            f"{tolerance:g}): the engine has other weights, or computes differently (dtype, quantisation). Training on "
            "its samples would be wrong; raise probe_tolerance only if you know why they differ"
        )
    if last_logprobs is None:
        return ProbeResult(largest, mean, None)
    last = np.array(last_logprobs)
    moved = float(np.abs(np.array(logprobs) - last).mean())
    # A wide margin: a move that is smaller than the noise between engine and trainer proves nothing either way.
    if float(np.abs(scored - last).mean()) < mean / 4:
        raise TrainingError(
            f"after the sync the engine is nearer to the old weights: it is {mean:.3g} nats from the new ones on the "
            f"probe, and they moved by {moved:.3g}. It did not load them"
        )
    # Wide margins again: the noise changes with the weights, and a part that was not loaded shows clearly.
    if noise is not None and mean > 4 * noise and mean > moved / 10:
        raise TrainingError(
            f"after the sync the engine is {mean:.3g} nats from the new weights in the mean of the probe. They moved "
            f"by {moved:.3g}, and at the first sync it was {noise:.3g}: it loaded only a part of them. (vLLM on a CPU "
            "keeps the old head when head and embedding are tied: serve a copy with both, as scripts/vllm_cpu.sh does)"
        )
    return ProbeResult(largest, mean, moved)
