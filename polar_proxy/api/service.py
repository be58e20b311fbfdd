"""Routes of the server itself: its state; pause, resume and drain of one server or of all servers of the database.

All servers are paused by one database row, which each server reads before it claims a rollout. `ServiceCollector` adds
the state of the rollout service and of the feed to the gateway's `/metrics`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polar_proxy import api_models as m
from polar_proxy.api.context import ApiContext, Context, make_routers, pause_timed_out, wait_or_undo, wait_until
from polar_proxy.engines.base import Engine, EngineLoad
from polar_proxy.errors import ApiError, EngineError
from polar_proxy.records import database_service_state, recent_activity
from polar_proxy.rollouts import RolloutService
from polar_proxy.rollouts.worker import Worker
from polar_proxy.store import Store
from polar_proxy.store.service.queue import FleetRow
from polar_proxy.types import Json

_WORKING = FleetRow(None, None)
_GRACE_SECONDS = 60.0
"""While a request waits until no server runs a rollout, it holds a provisional pause on all servers and renews it. If
the process is killed, the pause ends this many seconds after the next renewal was due."""
_RENEW_SECONDS = 30.0
"""Seconds after which a waiting request renews its provisional pause."""

routers = make_routers()
admin, trainer = routers.admin, routers.trainer


@trainer.get("/service", tags=["service"])
async def service_state(context: Context) -> m.ServiceState:
    """Return the state of the server and, if it has rollout workers, of its rollout service."""
    return await read_service_state(context)


@trainer.get("/activity", tags=["service"])
async def activity(context: Context) -> m.Activity:
    """Return the rates of the last minute, active sessions and the newest failures, of all servers."""
    return await recent_activity(context.store)


@trainer.post("/service/pause", tags=["service"])
async def pause_service(context: Context, body: m.ServicePauseRequest = m.ServicePauseRequest()) -> m.ServiceState:
    """Start no more rollouts of any job; running rollouts continue.

    With `wait_idle`, the response comes when no rollout runs any more. If some still run after `wait_idle` seconds,
    the response is 409 `pause_timed_out` and this pause is undone.
    """
    if body.scope == "all":
        await _pause_all(context.store, body.seconds, body.wait_idle)
    else:
        await _pause_one(_worker(context), body.seconds, body.wait_idle)
    return await read_service_state(context)


@trainer.post("/service/resume", tags=["service"])
async def resume_service(context: Context, body: m.ServiceResumeRequest = m.ServiceResumeRequest()) -> m.ServiceState:
    """End a pause or a drain that was requested with the same `scope`. A server that was paused on its own stays paused
    when all servers are resumed."""
    if body.scope == "all":
        await context.store.fleet.update(_WORKING)
        context.wake()
    else:
        _worker(context).resume()
    return await read_service_state(context)


@admin.post("/service/drain", tags=["service"])
async def drain_service(context: Context, body: m.DrainRequest = m.DrainRequest()) -> m.ServiceState:
    """Start no more rollouts, and respond when none runs any more.

    If that takes longer than `timeout`, the response is 409 `drain_timed_out` with the rollouts that still run,
    and the servers start rollouts again.
    """
    if body.scope == "all":
        left = await _pause_until_idle(context.store, body.timeout)
        if not left:
            await context.store.fleet.update(FleetRow(time.time(), None))
    else:
        left = await _worker(context).drain(body.timeout)
    if left:
        message = f"After {body.timeout:g} s, {len(left)} rollouts still run, so the drain was undone."
        raise ApiError(message, status=409, code="drain_timed_out", detail={"left": left})
    return await read_service_state(context)


def _worker(context: ApiContext) -> Worker:
    if context.service is None:
        raise ApiError(
            "This server has no rollout workers: start it with `polar serve --rollout-workers N`.",
            status=503,
            code="unavailable",
        )
    return context.service.worker


async def _pause_one(worker: Worker, seconds: float | None, wait_idle: float | None) -> None:
    """Pause this server's worker. If `wait_idle` is given, wait up to `wait_idle` seconds until no rollout runs.

    If rollouts still run after this time, undo the pause and raise ApiError `pause_timed_out`.
    """
    before = worker.paused_until
    worker.pause(seconds)
    if wait_idle is None:
        return

    async def idle() -> bool:
        return worker.in_flight == 0

    async def undo() -> None:
        worker.paused_until = before
        worker.wake()

    if not await wait_or_undo(idle, wait_idle, undo):
        raise pause_timed_out(wait_idle, worker.in_flight)


async def _pause_all(store: Store, seconds: float | None, wait_idle: float | None) -> None:
    """Pause all servers. If `wait_idle` is given, wait up to `wait_idle` seconds until no rollout runs.

    If rollouts still run after this time, undo the pause and raise ApiError `pause_timed_out`.
    """
    if wait_idle is not None and (left := await _pause_until_idle(store, wait_idle)):
        raise pause_timed_out(wait_idle, len(left))
    now = time.time()
    await store.fleet.update(FleetRow(now, None if seconds is None else now + seconds))


async def _pause_until_idle(store: Store, seconds: float | None) -> list[str]:
    """Pause all servers and wait up to `seconds` (None: without limit) until no rollout runs.

    If rollouts still run then, undo the pause and return their ids. If someone else pauses or resumes all servers
    during the wait, their change is kept; once it is noticed, ApiError `conflict` is raised.
    """
    before = await store.fleet.get()
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    pause = before
    left: list[str] = []
    done = False

    async def idle() -> bool:
        nonlocal left
        left = await store.fleet.in_flight()
        return not left

    try:
        while True:
            wait = min(_RENEW_SECONDS, max(0.0, deadline - time.monotonic()))
            renewed = FleetRow(time.time(), time.time() + wait + _GRACE_SECONDS)
            if not await store.fleet.update(renewed, only_if=pause):
                raise ApiError(
                    "Someone else paused or resumed all servers during the wait: check the state and try again.",
                    status=409,
                    code="conflict",
                )
            pause = renewed
            done = await wait_until(idle, wait)
            if done or time.monotonic() >= deadline:
                return left
    finally:
        if not done and pause is not before:
            await store.fleet.update(before, only_if=pause)


async def read_service_state(context: ApiContext) -> m.ServiceState:
    """Return the state of the server, its engine and its rollout service."""
    engine = None if context.engine is None else await _engine_state(context.engine, context.service)
    named = await asyncio.gather(*(_engine_state(one) for one in context.engines.values()))
    database = await database_service_state(context.store)
    state: Json = {
        **database.model_dump(),
        "engine": engine,
        "engines": dict(zip(context.engines, named, strict=True)),
        "policy_version": None if engine is None else engine["policy_version"],
    }
    if context.service is not None:
        counts, worker = context.service.counts(), context.service.worker
        working = worker.accepting and database.fleet.state == "working"
        state |= {
            "worker": worker.name,
            "state": "working" if working else "paused",
            "paused_until": None if worker.accepting or math.isinf(worker.paused_until) else worker.paused_until,
            "problem": worker.problem,
            "in_flight": counts["in_flight"],
            "stages": counts["stages"],
            "pool": counts["pool"],
        }
    return m.ServiceState.model_validate(state)


async def _engine_state(engine: Engine, service: RolloutService | None = None) -> Json:
    """Return the state of an engine. An engine that does not respond is reported as unhealthy.

    `service`: the rollout service that uses this engine. If given, the engine is not asked for its load: the state has
    the load that the service measured last, a few seconds ago.
    """
    version: str | None = None
    load: EngineLoad | None = None
    try:
        reason = await engine.health()
        version = await engine.weight_version()
        load = await engine.load() if service is None else service.engine_monitor.load
    except EngineError as error:
        reason = str(error)
    state: Json = {"kind": engine.info.engine, "version": engine.info.version, "model": engine.info.model}
    loaded = None if load is None else asdict(load)
    return state | {"policy_version": version, "healthy": reason is None, "reason": reason, "load": loaded}


class ServiceCollector(Collector):
    """Prometheus collector. It counts the feed's groups by state. If the server has a rollout service, it also reports
    the rollouts in flight, the stages and the sandbox pool."""

    def __init__(self, service: RolloutService | None, feed_depth: Callable[[], dict[str, int]]) -> None:
        self._service = service
        self._feed_depth = feed_depth

    def collect(self) -> Iterator[Metric]:
        feed = GaugeMetricFamily("polar_feed_groups", "Groups of the trainer feed by state.", labels=["state"])
        for state, groups in self._feed_depth().items():
            feed.add_metric([state], groups)
        yield feed
        if self._service is None:
            return
        counts = self._service.counts()
        yield GaugeMetricFamily("polar_rollouts_in_flight", "Rollouts that this process works on.", counts["in_flight"])
        yield from _stage_metrics(counts)
        yield from _pool_metrics(counts["pool"])


def _stage_metrics(counts: Json) -> Iterator[Metric]:
    families = {
        name: kind(f"polar_stage_{name}", text, labels=["stage"])
        for name, kind, text in (
            ("inside", GaugeMetricFamily, "Rollouts in the stage now."),
            ("waiting", GaugeMetricFamily, "Rollouts that wait to enter the stage."),
            ("limit", GaugeMetricFamily, "Rollouts that may be in the stage at a time."),
            ("entered", CounterMetricFamily, "Rollouts that entered the stage."),
            ("waited_seconds", CounterMetricFamily, "Seconds that rollouts waited to enter the stage."),
        )
    }
    refusals = CounterMetricFamily(
        "polar_stage_refusals", "Times that a rollout was not admitted, by reason.", labels=["stage", "reason"]
    )
    for stage, limiter in counts["stages"].items():
        for name, family in families.items():
            family.add_metric([stage], limiter[name])
        for reason, times in limiter["refusals"].items():
            refusals.add_metric([stage, reason], times)
    yield from (*families.values(), refusals)


def _pool_metrics(pool: Json) -> Iterator[Metric]:
    yield GaugeMetricFamily("polar_pool_waiting", "Sandboxes that are ready or opening.", pool["waiting"])
    taken = CounterMetricFamily(
        "polar_pool_taken",
        "Sandboxes taken: hit (from the pool), miss (opened on request), dead (replaced).",
        labels=["result"],
    )
    for result, name in (("hit", "hits"), ("miss", "misses"), ("dead", "dead")):
        taken.add_metric([result], pool[name])
    yield taken
    yield CounterMetricFamily("polar_pool_waited_seconds", "Seconds waited for a sandbox.", pool["waited_seconds"])
