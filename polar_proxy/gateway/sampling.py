"""The sampling policy: which parameters a call is sampled with, and how they are recorded."""

from __future__ import annotations

from dataclasses import fields, replace

from polar_proxy.engines.base import is_constrained
from polar_proxy.types import EngineRequest, Json, Sampling

_DEFAULTS: Json = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""OpenAI's own defaults. An engine's defaults (a model's generation_config) may cut the distribution; raw
log-probabilities would then not be those of the samples, and the record would not show it."""

_REPLACED = ("temperature", "top_p", "top_k", "min_p", "seed")
_FIELDS = tuple(field.name for field in fields(Sampling))


def apply_policy(request: EngineRequest, policy: Json) -> EngineRequest:
    """Return the request with the session's sampling policy applied and every default written out.

    `policy` may hold temperature, top_p, top_k, min_p and seed, which replace the client's values, and max_tokens,
    which is an upper bound and the value if the client gave none.
    """
    sampling = request.sampling
    changes: Json = {name: value for name, value in _DEFAULTS.items() if getattr(sampling, name) is None}
    changes |= {name: policy[name] for name in _REPLACED if name in policy}
    limit = policy.get("max_tokens")
    if limit is not None:
        changes["max_tokens"] = limit if sampling.max_tokens is None else min(limit, sampling.max_tokens)
    return replace(request, sampling=replace(sampling, **changes))


def recorded_sampling(request: EngineRequest, past_reasoning: str | None = None) -> Json:
    """Return the parameters that were sent to the engine, for the record.

    `constrained` is added if the request asked for a form of answer, `past_reasoning` if it shaped the prompt.
    """
    sent = {name: value for name in _FIELDS if (value := getattr(request.sampling, name)) not in (None, ())}
    constrained = is_constrained(request)
    if constrained is not None:
        sent["constrained"] = constrained
    if past_reasoning is not None:
        sent["past_reasoning"] = past_reasoning
    return sent
