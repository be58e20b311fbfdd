"""Values of recorded tokens that the server's engine computes on request: importance ratios and alternative tokens.

They are not stored. A training step computes the ratio and the entropy of each token, but keeps only their means
(`training/step_stats.py`): storing them for each token and step would need more room than the tokens themselves. So a
reader sees values of the engine's present weights. Only a few readers may use the engine at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError, UsageError
from polar_proxy.rollout_spec import whole_distribution
from polar_proxy.terminal import escape_controls
from polar_proxy.traces.scoring import score_sequence
from polar_proxy.training.loss_names import MAX_LOG_RATIO
from polar_proxy.types import Json, Sampling, TextRequest, TopLogprob
from polar_proxy.view.token_source import TokenSequence

ALTERNATIVES = 10
"""Number of alternatives (the most likely tokens) at a position."""
_AT_ONCE = 2
_NEEDED = frozenset({"score", "token_prompt"})


@dataclass(frozen=True, slots=True)
class EngineValues:
    """Computes values of tokens with the server's engines, for at most a few readers at a time."""

    engines: Sequence[Engine]
    _gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    def problem(self, sequence: TokenSequence) -> str | None:
        """Return why the engine can compute no values of these tokens; None if it can."""
        if not self.engines:
            return "this server has no engine"
        if self._find_engine(sequence) is None:
            model = sequence.engine.model if sequence.engine else "their model"
            return f"they need an engine that serves {model} and scores given tokens"
        return "this trace continues another trace" if sequence.facts.get("branch_at") else None

    def _find_engine(self, sequence: TokenSequence) -> Engine | None:
        model = None if sequence.engine is None else sequence.engine.model
        infos = ((engine, engine.info) for engine in self.engines)
        return next((engine for engine, info in infos if info.model == model and info.capabilities >= _NEEDED), None)

    def _engine_for(self, sequence: TokenSequence) -> Engine:
        engine, problem = self._find_engine(sequence), self.problem(sequence)
        if engine is None or problem is not None:
            raise UsageError(f"The values cannot be computed: {problem}.")
        return engine

    async def ratios(self, sequence: TokenSequence) -> Json:
        """Return the importance ratio of each token: its probability with the engine's present weights, divided by the
        recorded one; None where nothing was sampled, and where the two probabilities cannot be compared.

        Raises UsageError if there is a `problem`, EngineError if the engine fails.
        """
        engine = self._engine_for(sequence)
        temperatures = {span["scored_at"] for span in sequence.spans if span["scored_at"] is not None}
        async with self._gate:
            present = {one: await score_sequence(engine, sequence.token_ids, one) for one in sorted(temperatures)}
        ratios = await asyncio.to_thread(_ratios, sequence, present)
        return {"ratios": ratios, "policy_version": await engine.weight_version()}

    async def alternatives(self, sequence: TokenSequence, position: int) -> Json:
        """Return the likeliest tokens at `position` (from 1 on), each with text and log-probability, and a lower bound
        of the entropy at this position, in nats.

        Raises UsageError if there is a `problem` or no such position, RequestError if the engine refuses the request,
        EngineError if it fails.
        """
        engine = self._engine_for(sequence)
        if not 0 < position < len(sequence.token_ids):
            raise UsageError(f"{position} is not a position from 1 to {len(sequence.token_ids) - 1}.")
        span = next(span for span in reversed(sequence.spans) if span["at"] <= position)
        sampling = Sampling(
            **whole_distribution(span["scored_at"] or 1.0), max_tokens=1, logprobs=True, top_logprobs=ALTERNATIVES
        )
        request = TextRequest(engine.info.model, tuple(sequence.token_ids[:position].tolist()), sampling)
        async with self._gate, aclosing(engine.sample(request, stream=False)) as events:
            top = [one async for event in events for one in event.top[:1]]
        if not top:
            raise EngineError(f"The engine {engine.info.engine} returned no alternatives.")
        return {
            "alternatives": [[one.token_id, escape_controls(one.token), round(one.logprob, 4)] for one in top[0]],
            "least_entropy": round(least_entropy(top[0]), 4),
            "policy_version": await engine.weight_version(),
        }


def _ratios(sequence: TokenSequence, present: Mapping[float, npt.NDArray[np.float64]]) -> list[float | None]:
    """Return the ratio of each token. `present`: temperature -> log-probabilities with the present weights, [n]."""
    ratios = np.full(len(sequence.token_ids), np.nan)
    for span in sequence.spans:
        if span["scored_at"] is not None:
            here = slice(span["at"], span["at"] + span["end"] - span["start"])
            change = present[span["scored_at"]][here] - sequence.logprobs[here]
            ratios[here] = np.exp(np.clip(change, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return [None if math.isnan(ratio) else round(ratio, 4) for ratio in ratios.tolist()]


def least_entropy(top: Sequence[TopLogprob]) -> float:
    """Return a lower bound of a distribution's entropy in nats, from its likeliest tokens.

    H = -sum p log p. No other token is likelier than the least likely token in `top`, so the rest of the probability
    adds at least -rest * log p_last.
    """
    known = sum(math.exp(one.logprob) for one in top)
    of_known = -sum(math.exp(one.logprob) * one.logprob for one in top)
    return max(0.0, of_known - max(0.0, 1.0 - known) * min(one.logprob for one in top))
