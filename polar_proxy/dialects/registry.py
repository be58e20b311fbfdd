"""A recorded call read back: its stored items, raw and in their dialect's own form, as the canonical conversation."""

from __future__ import annotations

from polar_proxy.dialects.anthropic.dialect import AnthropicMessages
from polar_proxy.dialects.base import Dialect
from polar_proxy.dialects.google.dialect import GoogleGenerateContent
from polar_proxy.dialects.openai_chat import OpenAIChat
from polar_proxy.dialects.openai_completions import OpenAICompletions
from polar_proxy.dialects.openai_responses.dialect import OpenAIResponses
from polar_proxy.errors import RequestError
from polar_proxy.types import CallRecord, EngineRequest

_FIXED: dict[str, type[Dialect]] = {
    dialect.name: dialect for dialect in (AnthropicMessages, OpenAIChat, OpenAIResponses, OpenAICompletions)
}


def get_dialect(name: str, model: str = "") -> Dialect:
    """The dialect that calls are recorded under. `model` is for one whose URL, not its body, names the model.

    Raises KeyError for a name that no dialect has.
    """
    return GoogleGenerateContent(model) if name == GoogleGenerateContent.name else _FIXED[name]()


def recorded_request(call: CallRecord) -> EngineRequest:
    """What the call asked, in canonical form, before the session's policy: read from its stored parts.

    Raises RequestError for a call that cannot be read any more; none that was recorded by this version is.
    """
    try:
        dialect = get_dialect(call.dialect, call.model)
    except KeyError:
        raise RequestError(f"There is no dialect {call.dialect!r} in this version of Polar.") from None
    # TypeError and the like: stored parts that are no JSON, or not of this dialect.
    try:
        (request,) = dialect.parse(dialect.body(call.messages, call.tools, call.params)).requests
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RequestError(f"The stored request is damaged: {type(error).__name__}: {error}") from error
    return request
