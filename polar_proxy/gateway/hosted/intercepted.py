"""Intercepted requests: a program addressed them to a provider's host, but they reach the gateway, in one of two ways.

* `polar intercept`: the proxy sends them as `/s/KEY/intercept/HOST/PATH`.
* In a sandbox, model hosts resolve to a socket of the gateway. The header `Host` names the provider's host, and the
  socket determines the session; keys that the program sends are not read.

The table in `intercept/hosts.py` maps each path to a route of the gateway, or says how to answer or refuse it.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson

from polar_proxy.errors import RequestError
from polar_proxy.gateway.http import asgi
from polar_proxy.intercept.hosts import INTERCEPT_PREFIX, InterceptedPath, find_path

log = logging.getLogger(__name__)


class InterceptedRequest(NamedTuple):
    """A request for a path of a provider's host."""

    host: str
    path: str
    """The path on the provider's host, percent-decoded."""
    target: str
    """Path and query on the provider's host, as they were sent."""
    key: str | None
    """Key of the session, if the request came through a socket that belongs to one session."""
    found: InterceptedPath | None
    """The entry for the host in the table of `intercept/hosts.py`, with the rule for the path if there is one; None if
    the host is not a model host."""

    @classmethod
    def of_scope(cls, scope: asgi.Scope, sandbox_hosts: Container[str]) -> InterceptedRequest | None:
        """Return the intercepted request of an ASGI scope; None for a request to the gateway itself.

        `sandbox_hosts`: the model hosts that an agent in a sandbox may ask.
        """
        state = scope.get("state", {})
        key = state.get(asgi.SANDBOX_KEY)
        if key is not None:
            host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
            host, raw = host.partition(":")[0], scope["raw_path"].decode("latin-1")
        else:
            raw = asgi.path_without_key(scope)
            if not raw.startswith(INTERCEPT_PREFIX):
                return None
            host, _, rest = raw.removeprefix(INTERCEPT_PREFIX).partition("/")
            host, raw = unquote(host), f"/{rest}"
        path = unquote(raw)
        query = scope["query_string"].decode("latin-1")
        # Anyone can own a name such as those of Azure, so an agent in a sandbox must not choose one.
        found = find_path(host, path, names=sandbox_hosts if asgi.INSIDE_SANDBOX in state else None)
        return cls(host.lower(), path, f"{raw}?{query}" if query else raw, key, found)

    @property
    def route(self) -> str | None:
        """The gateway's route for this request; None if `answer` answers it."""
        return None if self.found is None else self.found.route

    async def answer(self, headers: Mapping[str, str], send: asgi.Send, form: asgi.ErrorFormat) -> None:
        """Answer a request that no route of the gateway serves: with the JSON body of its rule, or with error 404."""
        if self.found is not None and self.found.rule is not None:
            await asgi.send_json(send, 200, orjson.dumps(_filled_in(self.found.rule.body, headers)))
            return
        log.debug("an intercepted request for %s%s was refused", self.host, self.path)
        if self.found is None:
            why = "this is not a model host"
        else:
            why = f"Polar does not serve this path in place of {self.found.host.provider}"
        await asgi.send_error(send, RequestError(f"{self.host}{self.path} was refused: {why}.", status=404), form)


def _filled_in(value: Any, headers: Mapping[str, str]) -> Any:
    """Return the JSON object of a rule, with each `{name}` replaced by the request's header of that name."""
    if isinstance(value, dict):
        return {name: _filled_in(inner, headers) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled_in(inner, headers) for inner in value]
    if isinstance(value, str) and value.startswith("{"):
        return headers.get(value[1:-1], "")
    return value
