"""Wire formats of model providers. Each dialect implements `Dialect` (base.py).

A dialect's module is imported at its first use, because importing all of them takes a tenth of a second.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from polar_proxy.dialects.base import Dialect, ParsedRequest
from polar_proxy.errors import RequestError
from polar_proxy.types import CallRecord, EngineRequest

_CLASSES = {
    "anthropic_messages": "anthropic.dialect:AnthropicMessages",
    "google_generate_content": "google.dialect:GoogleGenerateContent",
    "openai_chat": "openai_chat.dialect:OpenAIChat",
    "openai_completions": "openai_completions:OpenAICompletions",
    "openai_responses": "openai_responses.dialect:OpenAIResponses",
}
"""Module and class of each dialect."""


def get_dialect(name: str, model: str = "") -> Dialect:
    """Return the dialect with this name, which is the field `dialect` of a recorded call.

    `model`: the model that the URL names; only Google's dialect needs it. Raises KeyError for an unknown name.
    """
    module, _, class_name = _CLASSES[name].partition(":")
    make: Callable[..., Dialect] = getattr(importlib.import_module(f"{__name__}.{module}"), class_name)
    return make(model) if name == "google_generate_content" else make()


def recorded_request(call: CallRecord) -> EngineRequest:
    """Return the engine request of a recorded call as it was before the session's sampling policy was applied.

    Raises RequestError for a damaged record.
    """
    (request,) = parse_recorded(call).requests
    return request


def parse_recorded(call: CallRecord, previous: ParsedRequest | None = None) -> ParsedRequest:
    """Return the parsed request of a recorded call. It contains exactly one engine request.

    `previous`: the parsed request of another call of the same session and dialect. Messages that both calls have are
    not parsed again. Raises RequestError for a damaged record.
    """
    try:
        dialect = get_dialect(call.dialect, call.model)
    except KeyError:
        raise RequestError(f"There is no dialect {call.dialect!r} in this version of Polar.") from None
    # Stored fields that are not JSON, or belong to another dialect, raise TypeError and similar errors.
    try:
        parsed = dialect.parse(dialect.rebuild_body(call.messages, call.tools, call.params), previous)
        (_,) = parsed.requests
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RequestError(f"The stored request is damaged: {type(error).__name__}: {error}") from error
    return parsed
