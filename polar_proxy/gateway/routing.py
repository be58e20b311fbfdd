"""Where a request belongs: to the session of its API key, of the key in its path, or of its connection; and to the
engine that a rule in `routes` names, else to the engine of the section [engine].

Promises about engines:

* The choice depends only on the session's id and label and on the model that the request names. So a session's calls
  for one model stay with one engine, even after a restart and on other gateways with the same settings.
* A prompt is never continued from tokens of another engine (`PromptBuilder`).
* No trace joins answers of two engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from urllib.parse import parse_qs

from polar_proxy.config import GatewaySettings, RouteSettings
from polar_proxy.engines.base import Engine
from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.errors import RequestError, StoreError
from polar_proxy.gateway.engine_timeouts import EngineTimeouts
from polar_proxy.gateway.health import HealthCheck, StoreMonitor
from polar_proxy.gateway.http import asgi
from polar_proxy.offload import OffloadThread
from polar_proxy.sessions.continuation import PromptBuilder
from polar_proxy.sessions.identity import key_of_request, key_without_api_key
from polar_proxy.sessions.registry import SessionRegistry
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import CallRecord

log = logging.getLogger(__name__)

ReadCall = Callable[[str], Awaitable[CallRecord | None]]
_NO_KEY = "No API key was sent. Polar accepts only keys made by `polar session new` or `polar connect` here."


class SessionFinder:
    """Finds the session of a request."""

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


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """An engine, with the objects that a gateway needs to call it."""

    name: str | None
    """Name of the engine in the settings [engines]; None for the engine of [engine]."""
    engine: Engine
    prompts: PromptBuilder
    health: HealthCheck
    timeouts: EngineTimeouts

    @classmethod
    def of(
        cls, name: str | None, engine: Engine, settings: GatewaySettings, read_call: ReadCall, thread: OffloadThread
    ) -> ServedEngine:
        health = HealthCheck("The engine" if name is None else f"The engine {name}", engine.health)
        prompts = PromptBuilder(engine, read_call, settings, thread, engine_name=name)
        return cls(name, engine, prompts, health, EngineTimeouts(settings, health.result))


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine for a call, and the name of the rule that chose it."""

    served: ServedEngine
    route: str | None = None

    @property
    def passthrough(self) -> PassthroughEngine | None:
        """The engine, if it passes calls on to their provider."""
        engine = self.served.engine
        return engine if isinstance(engine, PassthroughEngine) else None


class EngineRouter:
    def __init__(
        self, default: ServedEngine, named: Mapping[str, ServedEngine], rules: Sequence[RouteSettings]
    ) -> None:
        self.default = EngineChoice(default)
        self.all = (default, *named.values())
        self._named = {served.name: EngineChoice(served) for served in self.all}
        self._rules = [(rule, EngineChoice(named[rule.engine], rule.name)) for rule in rules]
        self.choices = (self.default, *(choice for _, choice in self._rules))
        """All possible results of `choose`."""

    def choose(self, session: SessionState, model: str) -> EngineChoice:
        """Return the engine for a call. `model`: the model that the request names."""
        for rule, choice in self._rules:
            if (
                _matches(model, rule.models)
                and _matches(session.label or "", rule.labels)
                and _in_share(session.session_id, rule)
            ):
                return choice
        return self.default

    def named(self, name: str | None) -> EngineChoice | None:
        """Return the engine of this name in the settings [engines]; for None, the engine of [engine].

        Returns None if it is not served any more.
        """
        return self._named.get(name)

    async def close(self) -> None:
        for served in self.all:
            await served.health.close()

    async def problem(self) -> str | None:
        """Return why an engine cannot sample, or None if no problem is known."""
        problems = await asyncio.gather(*(served.timeouts.problem() for served in self.all))
        for served, problem in zip(self.all, problems, strict=True):
            if problem is not None:
                return problem if served.name is None else f"engine {served.name}: {problem}"
        return None


def _matches(value: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(value, pattern) for pattern in patterns)


def _in_share(session_id: str, rule: RouteSettings) -> bool:
    """Return whether a rule with a `share` below 1 routes this session; True if `share` is 1.

    A hash of the rule's name and the session's id decides: the result for a session never changes, and two rules
    choose independently of each other.
    """
    if rule.share >= 1:
        return True
    drawn = hashlib.blake2b(f"{rule.name}/{session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(drawn) < rule.share * 2**64
