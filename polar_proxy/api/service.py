"""Routes of the server itself: how it stands, pause, resume and drain of its rollout service."""

from __future__ import annotations

import time

from polar_proxy import __version__
from polar_proxy import api_models as m
from polar_proxy.api import fleet
from polar_proxy.api.context import ApiContext, Routers
from polar_proxy.api.fleet import pause_timed_out
from polar_proxy.api.jobs import until
from polar_proxy.client.errors import ApiError
from polar_proxy.errors import EngineError
from polar_proxy.rollouts import RolloutService
from polar_proxy.types import Json


def add(rooms: Routers, api: ApiContext) -> None:
    admin, trainer = rooms.admin, rooms.trainer

    @trainer.get("/service", tags=["service"])
    async def state() -> m.ServiceState:
        """How the server stands, and its rollout service, where it has one (`polar serve --work`)."""
        return await _state(api)

    @trainer.post("/service/pause", tags=["service"])
    async def pause(body: m.ServicePauseRequest = m.ServicePauseRequest()) -> m.ServiceState:
        """Take nothing new of any job, on this server or, with `scope` all, on every server of its database; what is in
        hand goes on. As for a job, a pause that times out leaves nothing paused (409 `pause_timed_out`)."""
        if body.scope == "all":
            await fleet.pause(api.store, body.seconds, body.wait_idle)
            return await _state(api)
        service = _service(api)
        taking, until_then = service.taking, service.paused_until
        service.pause_all(body.seconds)
        if body.wait_idle is not None:

            async def idle() -> bool:
                return service.scheduler.in_flight == 0

            done = False
            try:
                done = await until(idle, body.wait_idle)
            finally:
                if not done and taking:
                    service.resume_all()
                elif not done:
                    service.pause_all(None if until_then is None else max(0.0, until_then - time.time()))
            if not done:
                raise pause_timed_out(body.wait_idle, service.scheduler.in_flight)
        return await _state(api)

    @trainer.post("/service/resume", tags=["service"])
    async def resume(body: m.ServiceResumeRequest = m.ServiceResumeRequest()) -> m.ServiceState:
        """Take work again, after a pause or a drain of the same `scope`. A server that was paused for itself stays so
        when all are resumed."""
        if body.scope == "all":
            await fleet.resume(api.store)
            api.wake()
        else:
            _service(api).resume_all()
        return await _state(api)

    @admin.post("/service/drain", tags=["service"])
    async def drain(body: m.DrainRequest = m.DrainRequest()) -> m.ServiceState:
        """Take nothing new, and answer when nothing is in hand any more: on this server or, with `scope` all, on every
        server of its database. Where that takes longer than `timeout`, 409 `drain_timed_out` with what is left, and
        work is taken again."""
        if body.scope == "all":
            left = await fleet.drain(api.store, body.timeout)
        else:
            left = await _service(api).drain(body.timeout)
        if left:
            message = f"After {body.timeout:g} s {len(left)} rollouts are still in hand: work is taken again."
            raise ApiError(message, status=409, code="drain_timed_out", detail={"left": left})
        return await _state(api)


def _service(api: ApiContext) -> RolloutService:
    if api.service is None:
        raise ApiError(
            "This server works on no rollouts: start it with `polar serve --work`.", status=503, code="unavailable"
        )
    return api.service


async def _state(api: ApiContext) -> m.ServiceState:
    version, engine = await _engine(api)
    feed = await api.store.feed.depth()
    row = await api.store.fleet.get()
    all_of_it: Json = {
        "state": "paused" if row.paused else "working",
        "paused_until": row.paused_until if row.paused else None,
        "in_flight": len(await api.store.fleet.in_flight()),
    }
    own: Json = {}
    if (service := api.service) is not None:
        counts = service.counts()
        gates = {name: {**gate, "refusals": counts["refusals"][name]} for name, gate in counts["gates"].items()}
        own = {
            "worker": service.scheduler.worker,
            "state": "working" if service.taking and not row.paused else "paused",
            "paused_until": service.paused_until,
            "in_flight": counts["in_flight"],
            "gates": gates,
            "pool": counts["pool"],
        }
        if engine is not None:
            engine = {**engine, "load": counts["engine"]}
    told = {
        "version": __version__,
        "engine": engine,
        "policy_version": version,
        "feed": feed,
        "fleet": all_of_it,
        **own,
    }
    return m.ServiceState.model_validate(told)


async def _engine(api: ApiContext) -> tuple[str | None, Json | None]:
    """Its policy version and state; an engine that is away is told as such."""
    if api.engine is None:
        return None, None
    info = api.engine.info
    version: str | None = None
    try:
        reason = await api.engine.health()
        version = await api.engine.weight_version()
    except EngineError as error:
        reason = str(error)
    told: Json = {"kind": info.engine, "version": info.version, "model": info.model}
    return version, {**told, "healthy": reason is None, "reason": reason}
