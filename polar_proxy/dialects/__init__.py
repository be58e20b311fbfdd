"""Wire formats of model providers. Each dialect implements `Dialect` (base.py)."""

from __future__ import annotations

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.base import Dialect, ParsedRequest
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.dialects.openai_chat.dialect import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import CallRecord, EngineRequest

_BY_NAME: dict[str, type[Dialect]] = {
    dialect.name: dialect for dialect in (AnthropicMessages, OpenAIChat, OpenAICompletions, OpenAIResponses)
}


def get_dialect(name: str, model: str = "") -> Dialect:
    """Return the dialect with this name, as recorded with calls. `model` is for Google, whose URL names the model.

    Raises KeyError for an unknown name.
    """
    return GoogleGenerateContent(model) if name == GoogleGenerateContent.name else _BY_NAME[name]()


def recorded_request(call: CallRecord) -> EngineRequest:
    """Return the engine request of a recorded call as it was before the session's sampling policy was applied.

    Raises RequestError for a damaged record.
    """
    (request,) = parse_recorded(call).requests
    return request


def parse_recorded(call: CallRecord, previous: ParsedRequest | None = None) -> ParsedRequest:
    """Return the parsed request of a recorded call. It contains exactly one engine request.

    `previous`: the parsed request of another call of the same session and dialect. Messages that are also in it are not
    parsed again. Raises RequestError for a damaged record.
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
