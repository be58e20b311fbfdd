"""The sender of a request, from its headers and body: the session key, and what the harness reports about the call.

Clients send session keys as API keys, and only the SHA-256 of a key is stored. A key of plain words is also the
session's label (`typed_label`). The metadata (thread, attempt) is read from a fixed list of headers and body fields, so
that keys and authorisation headers cannot get into the history or the store.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

_MAX_LENGTH = 200
"""Maximum number of characters of an id that are kept. Ids are short, but a client may send anything."""


@dataclass(frozen=True, slots=True)
class ClientMetadata:
    """Metadata of a call, from its headers and body. A missing field is None or 0."""

    retry: int = 0
    """How many times the client's SDK has sent this request before (`X-Stainless-Retry-Count`)."""
    thread: str | None = None
    """The harness's own id for this thread of the conversation."""
    parent_thread: str | None = None
    """The thread that started this one."""
    subagent: str | None = None
    """The kind of sub-agent that makes the call; None if the call is not known to come from a sub-agent."""
    request: str | None = None
    """The harness's own name for the request, such as `compaction`."""


_KEY_PREFIX = "sk-polar-"
_SEPARATORS = re.compile(r"[-_. ]")
_PLAIN_WORD = re.compile(r"[a-z]{1,16}|[A-Z][a-z]{0,15}|[A-Z]{1,16}|[0-9]{1,4}")
_MAX_WORDS = 5
NO_METADATA = ClientMetadata()

# The first one present is used. Sent by opencode, Codex, Claude Code, Pi on Responses, Vibe, terminus-2.
_THREAD_HEADERS = (
    "thread-id",
    "x-claude-code-session-id",
    "x-session-id",
    "session-id",
    "session_id",
    "x-affinity",
)

_BETA_HEADERS = ("anthropic-beta", "openai-beta")
_MOST_BETAS = 50


def read_client_metadata(headers: Mapping[str, str], params: Mapping[str, Any]) -> ClientMetadata:
    """Return the metadata in `headers` (by lower-case name) and `params` (the body without its messages)."""
    session = _thread_of_headers(headers)
    metadata = params.get("metadata")
    if session is None and isinstance(metadata, dict):
        session = _claude_session(metadata.get("user_id"))
    if session is None:  # OpenHands, terminus-2
        session = _text(params.get("prompt_cache_key")) or _text(params.get("session_id"))
    thread, parent, subagent = session, None, None
    if agent := headers.get("x-claude-code-agent-id"):
        thread, parent, subagent = agent, session, "agent"
    elif parent_id := headers.get("x-codex-parent-thread-id"):
        parent, subagent = parent_id, headers.get("x-openai-subagent") or "agent"
    elif parent_id := headers.get("x-parent-session-id"):
        parent, subagent = parent_id, "agent"
    retry = headers.get("x-stainless-retry-count") or "0"
    if thread is None and retry == "0":
        return NO_METADATA
    client = params.get("client_metadata")
    request = _text(client.get("request_kind")) if isinstance(client, dict) else None
    return ClientMetadata(
        retry=int(retry) if retry.isascii() and retry.isdigit() and len(retry) < 5 else 0,
        thread=_text(thread),
        parent_thread=_text(parent),
        subagent=_text(subagent),
        request=request,
    )


def read_betas(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beta features that the client asks its provider for, each as `header: feature`."""
    if not any(map(headers.__contains__, _BETA_HEADERS)):
        return ()
    named = [(header, beta.strip()) for header in _BETA_HEADERS for beta in headers.get(header, "").split(",")]
    return tuple(f"{header}: {beta[:_MAX_LENGTH]}" for header, beta in named[:_MOST_BETAS] if beta)


def _thread_of_headers(headers: Mapping[str, str]) -> str | None:
    return next((value for name in _THREAD_HEADERS if (value := headers.get(name))), None)


def _claude_session(user_id: object) -> str | None:
    """Return the session id from Claude Code's `user_id`, a JSON string with device, account and session."""
    if not isinstance(user_id, str) or not user_id.startswith("{"):
        return None
    try:
        value = orjson.loads(user_id)
    except orjson.JSONDecodeError:
        return None
    return _text(value.get("session_id")) if isinstance(value, dict) else None


def _text(value: object) -> str | None:
    return value[:_MAX_LENGTH] if isinstance(value, str) and value else None


def new_key() -> str:
    """Return a random session key that looks like an API key to any client."""
    return _KEY_PREFIX + secrets.token_urlsafe(24)


def is_issued_key(key: str) -> bool:
    """Return whether a key begins with the prefix of the session keys that Polar makes."""
    return key.startswith(_KEY_PREFIX)


def typed_label(key: str) -> str | None:
    """Return a key as a label if it is made of plain words and small numbers, such as `my-agent-2`; otherwise None.

    Such a key is a name that a person typed for a gateway that accepts any key. Any other key may be a secret.
    """
    words = _SEPARATORS.split(key)
    plain = len(words) <= _MAX_WORDS and all(_PLAIN_WORD.fullmatch(word) for word in words)
    return key if plain and not key.isdigit() else None


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def key_of_request(headers: Mapping[str, str], query_key: str | None) -> str | None:
    """Return the API key of a request; None if it has none.

    The key is in Authorization, x-api-key, x-goog-api-key or ?key=. If there are several, the first in this order
    counts. `headers`: by lower-case name.
    """
    authorization = headers.get("authorization", "")
    scheme, _, value = authorization.partition(" ")
    key = value.strip() if scheme.lower() == "bearer" else authorization
    return key or headers.get("x-api-key") or headers.get("x-goog-api-key") or query_key


def key_without_api_key(headers: Mapping[str, str], connection: str) -> str:
    """Return a substitute key for a request without an API key, so that two clients do not share a session.

    The substitute names the thread that the client reports in a header or, without such a header, the connection. The
    substitute contains a NUL, so a client cannot send it in a header.
    """
    thread = _thread_of_headers(headers)
    return f"\0connection {connection}" if thread is None else f"\0thread {thread}"
