"""The conversation of a recorded call: the messages and tools that the engine received, in OpenAI's form.

A call that cannot be converted from the agent's dialect is returned raw, with the reason in `unparsed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.types import CallRecord, Json, TextRequest

if TYPE_CHECKING:
    from polar_proxy.dialects.base import ParsedRequest


def conversation(call: CallRecord) -> Json:
    """Return {"messages", "tools"} of a call's request; `tools` is null if the call offered none.

    A raw prompt (Completions) has no roles: its message has the role `prompt`. If the
    request cannot be converted, messages and tools are raw, and "unparsed" has the reason.
    """
    return ConversationReader().read(call)


class ConversationReader:
    """Reads the conversations of a session's calls. A message that several calls contain is parsed once."""

    def __init__(self) -> None:
        self._last_parsed: dict[str, ParsedRequest] = {}
        """Dialect -> its last parsed request."""

    def read(self, call: CallRecord) -> Json:
        """Return the conversation of a call, as the function `conversation` does."""
        from polar_proxy.dialects import parse_recorded  # takes long to import, and tokens-jsonl needs none of it

        try:
            parsed = parse_recorded(call, self._last_parsed.get(call.dialect))
        except RequestError as error:
            tools = None if call.tools is None else _raw_json(call.tools)
            messages = [_raw_json(message) for message in call.messages]
            return {"messages": messages, "tools": tools, "unparsed": str(error)}
        self._last_parsed[call.dialect] = parsed
        (request,) = parsed.requests
        if isinstance(request, TextRequest):
            return {"messages": [{"role": "prompt", "content": request.prompt}], "tools": None}
        return {"messages": [message.to_openai() for message in request.messages], "tools": list(request.tools) or None}


def _raw_json(stored: bytes) -> Any:
    try:
        return orjson.loads(stored)
    except orjson.JSONDecodeError:
        return stored.decode(errors="replace")
