"""From what a request asks to settings with every default resolved and every value checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polar_proxy.engines.local.sampling import SamplingParams
from polar_proxy.errors import RequestError
from polar_proxy.types import Sampling

MAX_TOP_LOGPROBS = 50


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Used where a request is silent: the model's own generation config, as vLLM does."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    """None: the room that is left in the context."""

    @classmethod
    def of(cls, model: Any) -> SamplingDefaults:
        given = model.generation_config.to_diff_dict()
        return cls(
            temperature=_or(given.get("temperature"), 1.0),
            top_p=_or(given.get("top_p"), 1.0),
            top_k=_or(given.get("top_k"), 0),
            min_p=_or(given.get("min_p"), 0.0),
            max_tokens=given.get("max_new_tokens"),
        )


def resolve(sampling: Sampling, defaults: SamplingDefaults, vocab_size: int, room: int) -> tuple[SamplingParams, int]:
    """Settings, and max_tokens cut to the `room` left in the context. Raises RequestError."""
    temperature = _or(sampling.temperature, defaults.temperature)
    top_p = _or(sampling.top_p, defaults.top_p)
    top_k = _or(sampling.top_k, defaults.top_k)
    min_p = _or(sampling.min_p, defaults.min_p)
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
    return params, min(_or(_or(sampling.max_tokens, defaults.max_tokens), room), room)


def _bias(bias: Mapping[str, float], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        ids = [int(token) for token in bias]
    except ValueError as error:
        raise RequestError("logit_bias: keys must be token ids.", param="logit_bias") from error
    _check(all(0 <= token < vocab_size for token in ids), "logit_bias", f"has ids outside 0..{vocab_size - 1}")
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(list(bias.values()), dtype=torch.float32)


def _check(good: bool, name: str, rule: str) -> None:
    if not good:
        raise RequestError(f"{name} {rule}.", param=name)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
