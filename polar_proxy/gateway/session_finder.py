"""Finds the session of a request, by the request's API key, by the key in its path, or by its connection."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from urllib.parse import parse_qs

from polar_proxy.config import GatewaySettings
from polar_proxy.errors import RequestError, StoreError
from polar_proxy.gateway.health import StoreMonitor
from polar_proxy.gateway.http import asgi
from polar_proxy.sessions.identity import key_of_request, key_without_api_key
from polar_proxy.sessions.registry import SessionRegistry
from polar_proxy.sessions.state import SessionState

log = logging.getLogger(__name__)

_NO_KEY = "No API key was sent. Polar accepts only keys made by `polar session new` or `polar connect` here."


class SessionFinder:
    def __init__(self, sessions: SessionRegistry, monitor: StoreMonitor, settings: GatewaySettings) -> None:
        self._sessions = sessions
        self._monitor = monitor
        self._shared = settings.shared
        self._warned_of_no_key = False

    async def find(self, headers: Mapping[str, str], path_key: str | None, scope: asgi.Scope) -> SessionState:
        """Return the session of a request. Raises RequestError without a valid key, or if no session can be opened."""
        query = scope["query_string"]
        query_key = parse_qs(query.decode("latin-1")).get("key", [None])[0] if query else None
        key = key_of_request(headers, query_key)
        if not key and not path_key:
            key, path_key = self._key_without_api_key(headers, scope), None
        session = self._sessions.in_memory(key, path_key)
        if session is not None and not self._shared:
            return session
        inside_sandbox = asgi.INSIDE_SANDBOX in scope.get("state", {})
        try:
            find = partial(self._sessions.find, key, path_key, inside_sandbox=inside_sandbox)
            return await self._monitor.run(find)
        except StoreError as error:
            session = session or self._sessions.open_unstored(key, path_key, inside_sandbox=inside_sandbox)
            if session is None:
                raise self._monitor.refusal() from error
            self._monitor.watch()
            return session

    def _key_without_api_key(self, headers: Mapping[str, str], scope: asgi.Scope) -> str:
        if asgi.INSIDE_SANDBOX in scope.get("state", {}) or not self._sessions.open_to_all:
            raise RequestError(_NO_KEY, status=401, code="invalid_api_key")
        if not self._warned_of_no_key:
            self._warned_of_no_key = True
            log.warning(
                "A client sends no API key, so each of its connections is a separate session, unless it names its "
                "thread in a header. Give it a key of any name, or start it with `polar connect AGENT --`"
            )
        return key_without_api_key(headers, scope["state"][asgi.CONNECTION])
