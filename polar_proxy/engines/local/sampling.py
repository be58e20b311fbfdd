"""From logits to tokens: the whole batch in one go, in fp32, with the log-probabilities of what was sampled from.

The distribution of a row is the softmax of: logits + logit_bias - penalties, grammar mask, / temperature, min_p,
top_k, top_p (the order of vLLM). The log-probability reported is that distribution's ("processed"). At temperature 0
the most likely token is taken and top_k, top_p and min_p have no meaning; the log-probability is then that of
temperature 1.

Randomness: one uniform number per token from the choice's own generator, turned into a token by the inverse of the
cumulative distribution (float64). So a seed gives the same tokens whatever else is in the batch, up to the rounding
of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

GREEDY_BELOW = 1e-5
_BLOCK = 64


class TokenMask(Protocol):
    """A grammar: which tokens may come next. `error` says why it can go no further."""

    error: str | None

    def apply(self, logits: torch.Tensor) -> None:
        """Set logits [V] of forbidden tokens to -inf, in place."""

    def accept(self, token_id: int) -> None:
        """Move on by the token that was sampled."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings with every default resolved. `logit_bias` int64 [k] and float32 [k]."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[torch.Tensor, torch.Tensor] | None = None
    top_logprobs: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


class SequenceSampler:
    """Sampling state of one choice: its settings, its generator, its counts, its grammar."""

    __slots__ = ("_counts", "_generator", "_uniforms", "grammar", "inverse_temperature", "params", "touches_logits")

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, grammar: TokenMask | None = None) -> None:
        self.params = params
        self.grammar = grammar
        self.inverse_temperature = 1.0 if params.greedy else 1.0 / params.temperature
        self._generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        self._uniforms: list[float] = []
        penalised = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._counts = torch.zeros(vocab_size) if penalised else None
        self.touches_logits = penalised or params.logit_bias is not None or grammar is not None

    def uniform(self) -> float:
        """The next number in [0, 1); drawn in blocks, because one call of torch costs as much as 64 numbers."""
        if not self._uniforms:
            self._uniforms = torch.rand(_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
            self._uniforms.reverse()
        return self._uniforms.pop()

    def adjust(self, logits: torch.Tensor) -> None:
        """Bias, penalties over the tokens sampled so far, grammar; on logits [V] in place."""
        params = self.params
        if params.logit_bias is not None:
            logits[params.logit_bias[0]] += params.logit_bias[1]
        if self._counts is not None:
            logits -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)
        if self.grammar is not None:
            self.grammar.apply(logits)

    def accept(self, token_id: int) -> None:
        if self._counts is not None:
            self._counts[token_id] += 1
        if self.grammar is not None:
            self.grammar.accept(token_id)


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One token for each row. `top[i]` is empty unless row i asked: (token id, log-probability), best first."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


def draw(logits: torch.Tensor, rows: Sequence[SequenceSampler]) -> SampledBatch:
    """Sample one token for each row of `logits` [B, V] float32, which may be changed in place."""
    for position, row in enumerate(rows):
        if row.touches_logits:
            row.adjust(logits[position])
    if any(row.inverse_temperature != 1.0 for row in rows):
        scale = torch.tensor([row.inverse_temperature for row in rows], device=logits.device)
        logits = logits * scale[:, None]
    if any(row.params.truncates for row in rows):
        logits = truncate(logits, [row.params for row in rows])
    logprobs = torch.log_softmax(logits, dim=-1)
    ids = _pick(logprobs, rows)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    drawn = SampledBatch(ids.tolist(), chosen.tolist(), _top(logprobs, rows))
    for row, token_id in zip(rows, drawn.ids, strict=True):
        row.accept(token_id)
    return drawn


def _pick(logprobs: torch.Tensor, rows: Sequence[SequenceSampler]) -> torch.Tensor:
    """Token ids int64 [B]."""
    greedy = [row.params.greedy for row in rows]
    best = logprobs.argmax(dim=-1) if any(greedy) else None
    if best is not None and all(greedy):
        return best
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    total = cumulative[:, -1]
    uniform = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logprobs.device)
    # Strictly below the total: searchsorted then stops at a token whose probability is not zero.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    if best is not None:
        ids = torch.where(torch.tensor(greedy, device=ids.device), best, ids)
    return ids


def _top(logprobs: torch.Tensor, rows: Sequence[SequenceSampler]) -> list[list[tuple[int, float]]]:
    most = max(row.params.top_logprobs for row in rows)
    if most == 0:
        return [[] for _ in rows]
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    out: list[list[tuple[int, float]]] = []
    for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
        pairs = zip(row_ids[: row.params.top_logprobs], row_values, strict=False)
        # A token that truncation or a grammar forbids is no alternative, and -inf is not JSON.
        out.append([(token, value) for token, value in pairs if value != float("-inf")])
    return out


def truncate(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """min_p, then top_k, then top_p on what is left: tokens outside become -inf. logits [B, V] -> [B, V].

    top_p keeps the smallest set of most likely tokens whose probability reaches it, at least one token.
    """
    device, vocab = logits.device, logits.shape[-1]
    on = [p.truncates for p in params]
    if any(p.min_p > 0.0 for p in params):
        floor = torch.tensor([p.min_p if o else 0.0 for p, o in zip(params, on, strict=True)], device=device)
        gap = logits - logits.amax(dim=-1, keepdim=True)  # log(p / p_max)
        logits = logits.masked_fill(gap < floor.log()[:, None], float("-inf"))
    if not any(p.top_p < 1.0 or p.top_k > 0 for p in params):
        return logits
    keep = torch.tensor(
        [p.top_k if o and p.top_k > 0 else vocab for p, o in zip(params, on, strict=True)], device=device
    )
    mass = torch.tensor([p.top_p if o else 1.0 for p, o in zip(params, on, strict=True)], device=device)
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)
    ranked = ranked.masked_fill(rank >= keep[:, None], float("-inf"))
    probabilities = ranked.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # top_p = 1 must not cut the tail that rounding pushed beyond a sum of 1.
    cut = (before >= mass[:, None]) & (mass < 1.0)[:, None]
    cut[:, 0] = False
    ranked = ranked.masked_fill(cut, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter_(1, order, ranked)
