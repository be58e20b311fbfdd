"""Which dialect answers a path. Each route is served with and without its version, because some clients add it to the
base URL and some do not."""

from __future__ import annotations

from polar_proxy.dialects import (
    AnthropicMessages,
    AnthropicTokenCount,
    Dialect,
    OpenAIChat,
    OpenAICompletions,
    OpenAIResponses,
    ResponsesTokenCount,
    TokenCount,
)
from polar_proxy.dialects.google import GoogleGenerateContent, google_route

_FIXED: dict[str, Dialect | TokenCount] = {
    "/messages": AnthropicMessages(),
    "/messages/count_tokens": AnthropicTokenCount(),
    "/chat/completions": OpenAIChat(),
    "/completions": OpenAICompletions(),
    "/responses": OpenAIResponses(),
    "/responses/input_tokens": ResponsesTokenCount(),
}


def find_route(path: str, query: bytes) -> Dialect | TokenCount | None:
    """What serves POST to `path` (without `/s/{key}`), or None where no model route is.

    `query` is the URL's query string, as ASGI has it: Google's says how the answer is to be streamed.
    """
    return _FIXED.get(path.removeprefix("/v1")) or google_route(path, query.decode("latin-1"))


def error_shape(path: str) -> Dialect | TokenCount:
    """In whose form a client is told that there is no such route."""
    if path.removeprefix("/v1").startswith(("/messages", "/api/")):
        return _FIXED["/messages"]
    if path.startswith(("/v1beta", "/v1alpha")) or ("/models/" in path and ":" in path):
        return GoogleGenerateContent("")
    return _FIXED["/chat/completions"]
