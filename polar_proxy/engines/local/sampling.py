"""From logits to tokens: the whole batch at once, in fp32, with log-probabilities of the distribution sampled from.

The distribution of a row is the softmax of: logits + logit_bias - penalties, grammar mask, / temperature, min_p,
top_k, top_p (the order of vLLM). The log-probability reported is that distribution's ("processed"). At temperature 0
the most likely token is taken, top_k, top_p and min_p have no effect, and the log-probability is that of temperature 1.

Each token takes one uniform number from its choice's own generator and inverts the cumulative distribution (float64).
So a seed gives the same tokens whatever else is in the batch, up to the rounding of logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polar_proxy.engines.local.grammar import GrammarMask
from polar_proxy.errors import RequestError
from polar_proxy.types import Sampling

GREEDY_BELOW = 1e-5
MAX_TOP_LOGPROBS = 50
_UNIFORM_BLOCK = 64
"""Uniform numbers are drawn in blocks, because one call of torch costs as much as 64 numbers."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request with every default resolved. `logit_bias`: int64 [k] ids and float32 [k]."""

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


def resolve(sampling: Sampling, defaults: Mapping[str, Any], vocab_size: int, room: int) -> tuple[SamplingParams, int]:
    """Return the settings, and max_tokens cut to the `room` left in the context. Raises RequestError.

    `defaults` is the model's own generation config, used for parameters that a request leaves out (as vLLM does).
    """
    temperature = _first(sampling.temperature, defaults.get("temperature"), 1.0)
    top_p = _first(sampling.top_p, defaults.get("top_p"), 1.0)
    top_k = _first(sampling.top_k, defaults.get("top_k"), 0)
    min_p = _first(sampling.min_p, defaults.get("min_p"), 0.0)
    _check(sampling.n >= 1, "n", "must be at least 1")
    _check(0.0 <= temperature < 1e4, "temperature", "must be 0 or more")
    _check(0.0 < top_p <= 1.0, "top_p", "must be above 0 and at most 1")
    _check(top_k >= -1, "top_k", "must be 0 or -1 (off), or more")
    _check(0.0 <= min_p <= 1.0, "min_p", "must be between 0 and 1")
    _check(0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be 0..{MAX_TOP_LOGPROBS}")
    _check(sampling.max_tokens is None or sampling.max_tokens >= 1, "max_tokens", "must be at least 1")
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        presence_penalty=sampling.presence_penalty or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        logit_bias=_bias(sampling.logit_bias, vocab_size) if sampling.logit_bias else None,
        top_logprobs=sampling.top_logprobs,
    )
    return params, min(_first(sampling.max_tokens, defaults.get("max_new_tokens"), room), room)


def _bias(bias: Mapping[str, float], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        ids = [int(token) for token in bias]
    except ValueError as error:
        raise RequestError("logit_bias: keys must be token ids.", param="logit_bias") from error
    _check(all(0 <= token < vocab_size for token in ids), "logit_bias", f"has ids outside 0..{vocab_size - 1}")
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)


def _check(valid: bool, name: str, rule: str) -> None:
    if not valid:
        raise RequestError(f"{name} {rule}.", param=name)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


class SequenceSampler:
    """Sampling state of one choice: its settings, random generator, token counts and grammar."""

    def __init__(self, params: SamplingParams, seed: int, vocab_size: int, grammar: GrammarMask | None = None) -> None:
        self.params = params
        self.grammar = grammar
        self.inverse_temperature = 1.0 if params.greedy else 1.0 / params.temperature
        self._generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        self._uniforms: list[float] = []
        penalised = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._counts = torch.zeros(vocab_size) if penalised else None
        self.adjusts_logits = penalised or params.logit_bias is not None or grammar is not None

    def uniform(self) -> float:
        """Return the next random number in [0, 1)."""
        if not self._uniforms:
            self._uniforms = torch.rand(_UNIFORM_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
            self._uniforms.reverse()
        return self._uniforms.pop()

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply bias, penalties for the tokens sampled so far, and the grammar to logits [V], in place."""
        params = self.params
        if params.logit_bias is not None:
            logits[params.logit_bias[0]] += params.logit_bias[1]
        if self._counts is not None:
            logits -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)
        if self.grammar is not None:
            self.grammar.apply(logits)

    def accept(self, token_id: int) -> None:
        """Count the token that was sampled, and advance the grammar by it."""
        if self._counts is not None:
            self._counts[token_id] += 1
        if self.grammar is not None:
            self.grammar.accept(token_id)


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One token for each row. `top[i]` is empty unless row i asked for it: (token id, log-probability), best first."""

    ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


def sample_tokens(logits: torch.Tensor, rows: Sequence[SequenceSampler]) -> SampledBatch:
    """Sample one token for each row of `logits` [B, V] float32, which may be changed in place."""
    for position, row in enumerate(rows):
        if row.adjusts_logits:
            row.adjust(logits[position])
    if any(row.inverse_temperature != 1.0 for row in rows):
        scale = torch.tensor([row.inverse_temperature for row in rows], device=logits.device)
        logits = logits * scale[:, None]
    if any(row.params.truncates for row in rows):
        logits = truncate(logits, [row.params for row in rows])
    logprobs = torch.log_softmax(logits, dim=-1)
    ids = _pick(logprobs, rows)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    sampled = SampledBatch(ids.tolist(), chosen.tolist(), _top(logprobs, rows))
    for row, token_id in zip(rows, sampled.ids, strict=True):
        row.accept(token_id)
    return sampled


def _pick(logprobs: torch.Tensor, rows: Sequence[SequenceSampler]) -> torch.Tensor:
    """Return one token id per row, int64 [B]."""
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
        # A token that truncation or a grammar forbids is not an alternative, and -inf is not JSON.
        out.append([(token, value) for token, value in pairs if value != float("-inf")])
    return out


def truncate(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply min_p, then top_k, then top_p, each to the remaining tokens: forbidden tokens become -inf. logits [B, V] ->
    [B, V].

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
