"""Fields of the providers' request bodies that have no effect in Polar, for docs/reference/fields.md.

`tests/dialects/test_request_fields.py` compares these tables with the dialects and with the types of the SDKs.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from polar_proxy.dialects.anthropic.dialect import MessagesFields
from polar_proxy.dialects.google.schema import GenerateContentRequest, GenerationConfig
from polar_proxy.dialects.openai_chat.dialect import ChatFields
from polar_proxy.dialects.openai_completions import CompletionsFields
from polar_proxy.dialects.openai_responses.dialect import ResponsesFields

FIELDS: Mapping[str, type[BaseModel]] = {
    "openai_chat": ChatFields,
    "openai_completions": CompletionsFields,
    "openai_responses": ResponsesFields,
    "anthropic_messages": MessagesFields,
    "google_generate_content": GenerateContentRequest,
    "google_generate_content: generationConfig": GenerationConfig,
}
"""The model of each body, by its dialect; for Google also that of its `generationConfig`."""

_SERVICE = "steers the provider's own service"
_CACHE = "engines cache repeated prefixes without it"
_THREAD = f"it may name the agent's thread, which helps to join its calls; {_CACHE}"
_TEXT = "answers are text"
_EFFORT = "open models have no common setting for it; give the model's own in `chat_template_kwargs`"
_REWRITES = "it would change the prompt that the agent sent"

WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "openai_chat": {
        "audio": _TEXT,
        "metadata": _SERVICE,
        "modalities": _TEXT,
        "moderation": _SERVICE,
        "prediction": "a hint for speed, which engines take no notice of",
        "prompt_cache_key": _THREAD,
        "prompt_cache_options": _CACHE,
        "prompt_cache_retention": _CACHE,
        "reasoning_effort": _EFFORT,
        "safety_identifier": _SERVICE,
        "service_tier": _SERVICE,
        "store": "every call is recorded",
        "user": _SERVICE,
        "verbosity": "open models have no setting for it",
        "web_search_options": "nothing here searches the web",
    },
    "openai_completions": {"user": _SERVICE},
    "openai_responses": {
        "access_programs": _SERVICE,
        "context_management": _REWRITES,
        "image": _TEXT,
        "max_tool_calls": "it limits the provider's own tools, of which there are none; the response repeats it",
        "metadata": "the response repeats it",
        "moderation": _SERVICE,
        "n": "a response has one answer",
        "prompt_cache_key": _THREAD,
        "prompt_cache_options": _CACHE,
        "prompt_cache_retention": _CACHE,
        "reasoning.effort": f"only `none` has an effect: it turns thinking off; {_EFFORT}",
        "reasoning.summary": "the whole reasoning is sent",
        "safety_identifier": "the response repeats it",
        "service_tier": "the response repeats it",
        "stream_options": "it turns off the padding of streams, and Polar's streams have no padding",
        "text.verbosity": "open models have no setting for it",
        "truncation": "a prompt that is too long is refused; the response repeats the field",
        "user": "the response repeats it",
    },
    "anthropic_messages": {
        "betas": "no beta changes the answer",
        "billing_policy": _SERVICE,
        "cache_control": _CACHE,
        "compaction": _REWRITES,
        "container": _SERVICE,
        "context_management": _REWRITES,
        "diagnostics": _SERVICE,
        "fallback_credit_token": _SERVICE,
        "fallbacks": "one engine answers all calls",
        "inference_geo": _SERVICE,
        "mcp_servers": "nothing here calls tools; the agent does",
        "metadata": "a session id in its `user_id` names the agent's thread",
        "output_config.effort": "open models have no common setting for it",
        "service_tier": _SERVICE,
        "speed": _SERVICE,
        "thinking.budget_tokens": "open models have no setting for it; `thinking.type` turns thinking on and off",
        "thread": _SERVICE,
        "user_profile_id": _SERVICE,
        "workspace_id": _SERVICE,
    },
    "google_generate_content": {
        "labels": _SERVICE,
        "modelArmorConfig": _SERVICE,
        "safetySettings": "nothing here rates the safety of an answer",
        "serviceTier": _SERVICE,
        "store": "every call is recorded",
    },
    "google_generate_content: generationConfig": {
        "audioTimestamp": _TEXT,
        "audioTranscriptionConfig": _TEXT,
        "enableAffectiveDialog": _TEXT,
        "enableEnhancedCivicAnswers": _SERVICE,
        "imageConfig": _TEXT,
        "mediaResolution": "engines choose it themselves",
        "modelSelectionConfig": _SERVICE,
        "responseFormat": "give `responseMimeType` and `responseJsonSchema`",
        "routingConfig": _SERVICE,
        "speechConfig": _TEXT,
        "thinkingConfig.thinkingBudget": "only 0 has an effect: it turns thinking off",
        "thinkingConfig.thinkingLevel": "open models have no common setting for it",
        "translationConfig": _TEXT,
    },
}
"""Why a field has no effect, by dialect and field. It is recorded with the call, as every field is."""

REFUSED: Mapping[str, Mapping[str, str]] = {
    "openai_chat": {},
    "openai_completions": {
        "echo": "an answer has only what was sampled",
        "suffix": "no engine here fills in text before a suffix",
    },
    "openai_responses": {
        "prompt": "send the conversation in `input`",
    },
    "anthropic_messages": {},
    "google_generate_content": {"cachedContent": "send the contents themselves; " + _CACHE},
    "google_generate_content: generationConfig": {},
}
"""Why a field is refused with status 400, by dialect and field."""


def used_fields(dialect: str) -> list[str]:
    """Return the fields that have an effect, in the order of the model."""
    others = WITHOUT_EFFECT[dialect].keys() | REFUSED[dialect].keys()
    names = (field.alias or name for name, field in FIELDS[dialect].model_fields.items())
    return [name for name in names if name not in others]
