"""Sample tokens from logits, in fp32. Log-probabilities are those of the sampled distribution ("processed").

This distribution is the softmax after these steps, in vLLM's order: logits + logit_bias - penalties, grammar mask,
division by temperature, min_p, top_k, top_p. At temperature 0 the most likely token is taken, top_k, top_p and min_p
have no effect, and the log-probability is that of temperature 1.

To sample a token, one uniform number is drawn from the choice's own generator, and the cumulative distribution
(float64) is inverted at this number. So a seed gives the same tokens whatever else is in the batch, up to the rounding
of logits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from polar_proxy.engines.base import GREEDY_BELOW
from polar_proxy.engines.local.grammar import GrammarMask
from polar_proxy.errors import RequestError
from polar_proxy.types import Sampling

MAX_TOP_LOGPROBS = 50


def resolve(sampling: Sampling, defaults: Mapping[str, Any], vocab_size: int, room: int) -> tuple[Sampling, int]:
    """Return the settings with every default filled in, and the maximum length of the answer in tokens.

    `defaults`: the model's own generation config, used for parameters that a request leaves out (as vLLM does).
    `room`: the most tokens that an answer may have, whatever the request asks for. Raises RequestError for an invalid
    setting.
    """
    temperature = _first(sampling.temperature, defaults.get("temperature"), 1.0)
    top_p = _first(sampling.top_p, defaults.get("top_p"), 1.0)
    repetition = _first(sampling.repetition_penalty, defaults.get("repetition_penalty"), 1.0)
    top_k = _first(sampling.top_k, defaults.get("top_k"), 0)
    min_p = _first(sampling.min_p, defaults.get("min_p"), 0.0)
    _check(sampling.n >= 1, "n", "must be at least 1")
    _check(0.0 <= temperature < 1e4, "temperature", "must be 0 or more")
    _check(0.0 < top_p <= 1.0, "top_p", "must be above 0 and at most 1")
    _check(top_k >= -1, "top_k", "must be 0 or -1 (off), or more")
    _check(0.0 <= min_p <= 1.0, "min_p", "must be between 0 and 1")
    _check(repetition > 0.0, "repetition_penalty", "must be above 0")
    _check(0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be 0..{MAX_TOP_LOGPROBS}")
    _check(sampling.max_tokens is None or sampling.max_tokens >= 1, "max_tokens", "must be at least 1")
    biased = sampling.logit_bias or {}
    _check(all(map(str.isdecimal, biased)), "logit_bias", "must have token ids as keys")
    _check(all(int(token) < vocab_size for token in biased), "logit_bias", f"has ids outside 0..{vocab_size - 1}")
    max_tokens = min(_first(sampling.max_tokens, defaults.get("max_new_tokens"), room), room)
    resolved = replace(
        sampling, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition
    )
    return resolved, max_tokens


def _check(valid: bool, name: str, rule: str) -> None:
    if not valid:
        raise RequestError(f"{name} {rule}.", param=name)


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)


class SequenceSampler:
    """Sampling state of one choice: its settings (after `resolve`), random generator, token counts and grammar."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        vocab_size: int,
        grammar: GrammarMask | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.grammar = grammar
        self.greedy = sampling.temperature is not None and sampling.temperature < GREEDY_BELOW
        self.top_logprobs = sampling.top_logprobs
        self.random = random.Random(seed)
        self._presence = sampling.presence_penalty or 0.0
        self._frequency = sampling.frequency_penalty or 0.0
        self._counts = torch.zeros(vocab_size) if self._presence or self._frequency else None
        self._repetition = sampling.repetition_penalty or 1.0
        self._seen: torch.Tensor | None = None
        """bool [V]: tokens of the prompt and of the answer so far; None without a repetition penalty."""
        if self._repetition != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[list(prompt)] = True
        self._bias: torch.Tensor | None = None
        if sampling.logit_bias:
            self._bias = torch.zeros(vocab_size)
            for token, value in sampling.logit_bias.items():
                self._bias[int(token)] = value
        self._warpers = [] if self.greedy else _warpers(sampling)

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [V] of the distribution to sample from."""
        if self._bias is not None:
            logits = logits + self._bias
        if self._seen is not None:
            penalised = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits = torch.where(self._seen, penalised, logits)
        if self._counts is not None:
            logits = logits - self._frequency * self._counts - self._presence * (self._counts > 0)
        if self.grammar is not None:
            logits = self.grammar.apply(logits)
        for warper in self._warpers:
            logits = warper(None, logits[None])[0]
        return logits

    def accept(self, token_id: int) -> None:
        if self._counts is not None:
            self._counts[token_id] += 1
        if self._seen is not None:
            self._seen[token_id] = True
        if self.grammar is not None:
            self.grammar.accept(token_id)


def _warpers(sampling: Sampling) -> list[Any]:
    """Return the functions that apply temperature and truncation to logits [rows, V], in the order to call them."""
    warpers: list[Any] = []
    if sampling.temperature is not None and sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k is not None and sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. `top`: the most likely tokens as (id, log-probability), best first, if they were requested."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def sample_tokens(logits: torch.Tensor, rows: Sequence[SequenceSampler]) -> list[SampledToken]:
    """Sample one token for each row of `logits` [B, V] float32."""
    adjusted = [row.adjust(one) for row, one in zip(rows, logits, strict=True)]
    logprobs = torch.stack(adjusted).log_softmax(dim=-1)
    ids = _pick(logprobs, rows)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    tokens = [
        SampledToken(token_id, logprob, _top(of_row, row.top_logprobs))
        for row, of_row, token_id, logprob in zip(rows, logprobs, ids.tolist(), chosen.tolist(), strict=True)
    ]
    for row, token in zip(rows, tokens, strict=True):
        row.accept(token.token_id)
    return tokens


def _pick(logprobs: torch.Tensor, rows: Sequence[SequenceSampler]) -> torch.Tensor:
    """Sample one token id per row, int64 [B]; for a greedy row, take the most likely one."""
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    total = cumulative[:, -1]
    uniform = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
    # Strictly below the total: searchsorted then stops at a token whose probability is not zero.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    sampled = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return torch.where(torch.tensor([row.greedy for row in rows]), logprobs.argmax(dim=-1), sampled)


def _top(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens of a row [V] as (id, log-probability), without forbidden ones."""
    if count == 0:
        return []
    values, ids = logprobs.topk(min(count, len(logprobs)))
    # A token that truncation or a grammar forbids is not an alternative, and -inf is not JSON.
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value != float("-inf")]
