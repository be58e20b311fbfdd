"""Find out whether a call failed because of the engine, or because of a request that the engine can never answer.

An agent could make the engine fail on purpose, with a parameter or text that the engine answers with a 5xx status. Such
an agent must not get another attempt. So the last failed request of each session is kept, and can be sent to the engine
again. The request is at fault if it fails twice more and the engine answers a plain request ("Hello") in between.
Tokens that are sampled here are never recorded, sent or trained on. A hosted model costs money for each request, so
failed requests are not sent to it again. The provider is held responsible for each failure of a hosted model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from polar_proxy.errors import PolarError
from polar_proxy.gateway.recording import PendingCall
from polar_proxy.gateway.routing import ServedEngine
from polar_proxy.sessions.lineage import Base
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import ChatRequest, EngineRequest, Message, Sampling

log = logging.getLogger(__name__)

_SECONDS = 60.0
"""Time limit in seconds of each request of this module: of the failed request and of the plain one. If the answer has
begun by then, the request counts as answered."""


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that the engine failed to answer."""

    session: SessionState
    engine: ServedEngine
    calls: tuple[tuple[EngineRequest, Base | None], ...]
    """Each engine request of the HTTP request, with the earlier answer that its prompt continues, if any."""


class FailedRequests:
    """For each session, the last request that the engine failed to answer. Hosted engines are left out."""

    def __init__(self) -> None:
        self._by_session: dict[str, FailedRequest] = {}

    def keep(self, session: SessionState, calls: Sequence[PendingCall]) -> None:
        if "hosted" in calls[0].engine.served.engine.info.capabilities:
            return
        failed = tuple((call.request, call.lineage.base) for call in calls)
        self._by_session[session.session_id] = FailedRequest(session, calls[0].engine.served, failed)

    def forget(self, session_id: str) -> None:
        self._by_session.pop(session_id, None)

    async def request_fault(self, session_id: str) -> str | None:
        """Find out whether the session's last failed request is itself at fault.

        The request is sent to the engine again. If it fails again, a plain request is sent, then the failed one once
        more. Return the error of the failed request if only the plain one is answered. Return None if the failed
        request is answered now, if the engine is at fault, or if no request failed.
        """
        failed = self._by_session.get(session_id)
        if failed is None:
            return None
        plain = ChatRequest(failed.engine.engine.info.model, (Message("user", "Hello"),), Sampling(max_tokens=1))
        for request, base in failed.calls:
            if await _try(failed, request, base) is not None:
                engine_fails = await _try(failed, plain, None) is not None
                return None if engine_fails else await _try(failed, request, base)
        return None


async def _try(failed: FailedRequest, request: EngineRequest, base: Base | None) -> str | None:
    """Sample an answer and drop it. Return why it failed, or None."""
    began = False
    try:
        async with asyncio.timeout(_SECONDS):
            plan = await failed.engine.prompts.build(request, base, failed.session)
            async with contextlib.aclosing(failed.engine.engine.sample(request, prompt=plan.prompt)) as events:
                async for _ in events:
                    began = True
    except TimeoutError:
        return None if began else f"no answer within {_SECONDS:g} s"
    except PolarError as error:
        return str(error)
    except Exception as error:
        log.exception("a request that had failed was tried again, and failed inside Polar")
        return f"{type(error).__name__}: {error}"
    return None
