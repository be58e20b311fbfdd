"""Tables that say which fields of a client's request are passed to which hosted provider.

A client's body has three kinds of fields. The conversation, its tools and its sampling are in `ChatRequest`, and each
engine writes them in its provider's format. Reasoning options are translated (`ClientOptions`). All other fields
(`ClientOptions.fields`) steer a provider's own service: they are passed on if client and provider use the same API
(`PASSED`). If a field reaches the provider in none of these ways, the request is refused (`REFUSED_SAMPLING`), or
`not_carried` returns the field's name, which is recorded with the call.
"""

from __future__ import annotations

from collections.abc import Mapping

from polar_proxy.errors import RequestError
from polar_proxy.types import ChatRequest, EngineRequest, Sampling


def _unchanged(names: str) -> dict[str, str]:
    return {name: name for name in names.split()}


PASSED: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "openai": {
        "openai_chat": _unchanged(
            "metadata moderation prediction prompt_cache_key prompt_cache_options prompt_cache_retention "
            "safety_identifier service_tier store user verbosity"
        ),
        "openai_responses": {
            **_unchanged(
                "metadata moderation prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier "
                "service_tier user"
            ),
            "text.verbosity": "verbosity",
        },
    },
    "anthropic": {"anthropic_messages": _unchanged("cache_control inference_geo metadata service_tier speed thinking")},
    "google": {
        "google_generate_content": _unchanged(
            "labels modelArmorConfig safetySettings serviceTier generationConfig.mediaResolution "
            "generationConfig.enableEnhancedCivicAnswers"
        )
    },
}
"""Fields that are passed on: provider -> dialect -> the client's field -> the provider's field."""

PASSED_BETAS: Mapping[str, frozenset[str]] = {
    "openai": frozenset(),
    "anthropic": frozenset(
        {
            "anthropic-beta: context-1m-2025-08-07",
            "anthropic-beta: extended-cache-ttl-2025-04-11",
            "anthropic-beta: fast-mode-2026-02-01",
            "anthropic-beta: interleaved-thinking-2025-05-14",
            "anthropic-beta: model-context-window-exceeded-2025-08-26",
            "anthropic-beta: output-128k-2025-02-19",
            "anthropic-beta: output-300k-2026-03-24",
            "anthropic-beta: pdfs-2024-09-25",
            "anthropic-beta: prompt-caching-2024-07-31",
            "anthropic-beta: structured-outputs-2025-11-13",
            "anthropic-beta: thinking-token-count-2026-05-13",
            "anthropic-beta: token-efficient-tools-2025-02-19",
        }
    ),
    "google": frozenset(),
}
"""Beta features that are passed on, by provider. Such a feature needs no fields except those of the conversation
and of `PASSED`, and runs no tools at the provider.
Source: the values of `AnthropicBetaParam` in Anthropic's SDK."""

_COMMON_SAMPLING = frozenset(
    {"temperature", "top_p", "max_tokens", "seed", "stop", "n", "presence_penalty", "frequency_penalty"}
)
SAMPLING: Mapping[str, frozenset[str]] = {
    "openai": _COMMON_SAMPLING | {"logit_bias"},
    "anthropic": frozenset({"max_tokens", "stop"}),
    "google": _COMMON_SAMPLING | {"top_k"},
}
"""Sampling parameters that each provider's API has."""
REFUSED_SAMPLING = frozenset({"n", "logit_bias"})
"""Parameters that must not be dropped silently, because the client would get another answer than it asked for. If a
request sets such a parameter and the provider's API does not have it, the request is refused."""
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "stop": (),
}
"""For each parameter, the value with which it has no effect."""


def effective_sampling(sampling: Sampling) -> dict[str, object]:
    """Return the sampling parameters that are set and have an effect, with their values."""
    names = Sampling.__dataclass_fields__
    values = {name: getattr(sampling, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value != NEUTRAL.get(name)}


def refuse_sampling(sampling: Sampling, provider: str) -> None:
    """Raise RequestError if the request sets a parameter of `REFUSED_SAMPLING` that the provider does not have."""
    for name in sorted((REFUSED_SAMPLING & effective_sampling(sampling).keys()) - SAMPLING[provider]):
        text = f"'{name}' is not supported here: {provider} has no such parameter."
        raise RequestError(text, param=name, code="unsupported_parameter")


def passed_fields(request: ChatRequest, provider: str) -> dict[str, object]:
    """Return the fields that are passed to the provider; empty if the client used another provider's API."""
    options = request.options
    if options is None:
        return {}
    names = PASSED[provider].get(options.dialect, {})
    return {names[name]: value for name, value in options.fields.items() if name in names}


def passed_betas(request: EngineRequest, provider: str) -> tuple[str, ...]:
    """Return the names of the beta features that the client asks for and that are passed to the provider."""
    options = request.options if isinstance(request, ChatRequest) else None
    asked = () if options is None else options.betas
    return tuple(beta.partition(": ")[2] for beta in asked if beta in PASSED_BETAS[provider])


def not_carried(request: EngineRequest, provider: str) -> tuple[str, ...]:
    """Return the names of the request's options that are not passed to the provider, in alphabetical order."""
    missing = {name for name in effective_sampling(request.sampling) if name not in SAMPLING[provider]}
    if isinstance(request, ChatRequest):
        options = request.options
        if options is not None:
            missing |= options.fields.keys() - PASSED[provider].get(options.dialect, {}).keys()
            missing |= set(options.betas) - PASSED_BETAS[provider]
        if provider != "anthropic" and any(message.cache_control for message in request.messages):
            missing.add("cache_control")
    return tuple(sorted(missing))
