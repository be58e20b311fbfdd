"""The head of a cluster: keeps an actor on each node that can run agents, and reclaims the rollouts of dead nodes.

The actors outlive a head that is killed: the nodes continue, and the next head finds them by their names. A head that
is stopped stops its actors, and their rollouts in flight go back into the queue.

Promise: the rollouts of a dead node are back in the queue as soon as Ray knows that the node is dead. A wrong report by
Ray does no harm, because a worker that lost its claim can no longer write (`ClaimLostError`). While no head runs, the
leases of a dead node expire, and any other node reclaims its rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any, Self

from polar_proxy.config import Settings
from polar_proxy.errors import PolarError, UsageError
from polar_proxy.rollouts.cluster.node import (
    NodeActor,
    NodeConfig,
    NodePlan,
    NodeState,
    RayNode,
    await_ref,
    plan_nodes,
    scoring_resources,
)
from polar_proxy.rollouts.recovery import MAX_ATTEMPTS, account_for_reclaimed
from polar_proxy.store import Store

log = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_RETRY_SECONDS = 5.0
"""Pause before an actor that failed to start is started again."""
_STOP_SECONDS = 60.0


class Cluster:
    """`async with Cluster(settings, store, address) as cluster:` keeps the nodes working until the block ends."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        address: str,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`address` is HOST:PORT of the Ray cluster, or `auto` for the cluster that this machine belongs to.

        Raises UsageError for a database that other machines cannot reach."""
        if store.database.dialect == "sqlite":
            raise UsageError(
                "A cluster needs a database that all machines can reach: give --db postgresql://USER@HOST/NAME."
            )
        try:
            import ray
        except ImportError as error:
            raise UsageError("A cluster needs Ray: run pip install 'polar-proxy[ray]' on each machine.") from error
        self._ray: Any = ray
        self._settings = settings
        self._store = store
        self._address = address
        self._note = note
        self._plans: dict[str, NodePlan] = {}
        self._scoring_resources: dict[str, float] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._working: set[str] = set()
        """Ids of the nodes whose actors work now."""

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._connect)
        # Ray's handler would abort the process three seconds after SIGTERM, before the nodes have stopped.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        self._watching = asyncio.create_task(self._watch_nodes(), name="polar-cluster")
        return self

    async def __aexit__(self, *exception: object) -> None:
        tasks = [self._watching, *self._keepers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(plan) for plan in self._plans.values()))
        await asyncio.to_thread(self._ray.shutdown)

    # Ray

    def _connect(self) -> None:
        try:
            self._ray.init(
                address=self._address,
                # A hash of the database's address: services with other databases stay apart, and the next head finds
                # the nodes of this one.
                namespace="polar-" + hashlib.sha256(self._store.display_url.encode()).hexdigest()[:16],
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"This machine belongs to no Ray cluster with the address {self._address} ({error}). "
                "Start a cluster with `ray start --head`, or join one with `polar node --ray-address HOST:PORT`."
            ) from error

    async def _alive(self) -> list[RayNode]:
        rows: list[dict[str, Any]] = await asyncio.to_thread(self._ray.nodes)
        return [RayNode(row["NodeID"], row["NodeManagerAddress"], row["Resources"]) for row in rows if row["Alive"]]

    def _actor(self, plan: NodePlan) -> Any:
        """Return the node's actor, starting it if there is none."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources = dict(plan.reserved)
        memory = resources.pop("memory", None)
        options = self._ray.remote(NodeActor).options(
            name=_actor_name(plan),
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            memory=memory,
            resources=resources,
            scheduling_strategy=NodeAffinitySchedulingStrategy(plan.node_id, soft=False),
        )
        return options.remote(self._config(plan), self._scoring_resources)

    def _config(self, plan: NodePlan) -> NodeConfig:
        return NodeConfig(self._settings, plan.address, plan.agents)

    # One task for each node

    async def _watch_nodes(self) -> None:
        had_nodes = True
        while True:
            try:
                alive = await self._alive()
            except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
                log.error("the cluster does not list its nodes (%s); trying again", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._scoring_resources = scoring_resources(alive)
            self._plans = {plan.node_id: plan for plan in plan_nodes(alive)}
            self._drop_ended_keepers()
            for node_id, plan in self._plans.items():
                if node_id not in self._keepers:
                    name = f"polar-node-{node_id[:8]}"
                    self._keepers[node_id] = asyncio.create_task(self._keep_working(plan), name=name)
            if had_nodes and not self._plans:
                self._note("the cluster has no node that takes work: add one with `polar node`")
            had_nodes = bool(self._plans)
            await asyncio.sleep(_POLL_SECONDS)

    def _drop_ended_keepers(self) -> None:
        for node_id, task in list(self._keepers.items()):
            if not task.done():
                continue
            del self._keepers[node_id]
            if not task.cancelled() and (failure := task.exception()) is not None:
                log.error(
                    "node %s: the task that keeps an actor on it failed and is restarted", node_id, exc_info=failure
                )

    async def _keep_working(self, plan: NodePlan) -> None:
        """Keep an actor working on the node for as long as the node lives."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        worker: str | None = None
        try:
            while plan.node_id in self._plans:
                try:
                    actor = await asyncio.to_thread(self._actor, plan)
                    state: NodeState = await await_ref(actor.state.remote())
                    if worker is not None and worker != state.worker:
                        await self._reclaim_from(worker)
                    if state.digest != self._config(plan).digest:
                        self._note(f"node {plan.address} has other settings: it is restarted")
                        await self._stop(plan)
                        continue
                    worker = state.worker
                    self._working.add(plan.node_id)
                    self._note(f"node {plan.address}: {plan.agents} agents at a time, gateway {state.url}")
                    await await_ref(actor.ended.remote())
                    return
                except RayTaskError as error:
                    cause = error.cause if isinstance(error.cause, PolarError) else error
                    self._note(f"node {plan.address} cannot start: {cause}")
                    await self._kill(plan)
                    await asyncio.sleep(_RETRY_SECONDS)
                except (RayActorError, GetTimeoutError):  # its process or the whole node died
                    await asyncio.sleep(_POLL_SECONDS)
                except RayError as error:
                    self._note(f"node {plan.address}: {error}")
                    await asyncio.sleep(_RETRY_SECONDS)
                finally:
                    self._working.discard(plan.node_id)
        finally:
            if worker is not None and plan.node_id not in self._plans:
                self._note(f"node {plan.address} is gone")
                await self._reclaim_from(worker)

    async def _reclaim_from(self, worker: str) -> None:
        """Queue the rollouts of a dead worker again, and end those that were cancelled or have no attempt left.

        Every living node then removes the sandboxes of dead processes on its own machine. If no node runs on the dead
        worker's machine, the worker's sandboxes stay."""
        reclaimed = await self._store.queue.reclaim_from(worker, attempts=MAX_ATTEMPTS)
        for group_id in await account_for_reclaimed(self._store, reclaimed):
            await self._store.groups.settle(group_id)
        if reclaimed:
            queued = sum(attempt > 0 for attempt in reclaimed.values())
            self._note(f"rollouts of a dead node: {queued} are queued again, {len(reclaimed) - queued} have ended")
        for plan in list(self._plans.values()):
            if plan.node_id in self._working:
                with contextlib.suppress(self._ray.exceptions.RayError):  # that node's own task handles it
                    actor = await asyncio.to_thread(self._actor, plan)
                    await await_ref(actor.sweep.remote())

    async def _stop(self, plan: NodePlan) -> None:
        """Stop the node's actor, if it has one; its rollouts in flight go back into the queue."""
        try:
            actor = await asyncio.to_thread(self._ray.get_actor, _actor_name(plan))
        except ValueError:
            return
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await await_ref(actor.stop.remote())
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            log.warning("node %s did not stop cleanly: %s", plan.address, error)
        await self._kill(plan)

    async def _kill(self, plan: NodePlan) -> None:
        """Kill the node's actor and wait until its name is free."""
        with contextlib.suppress(ValueError):
            actor = await asyncio.to_thread(self._ray.get_actor, _actor_name(plan))
            await asyncio.to_thread(self._ray.kill, actor, no_restart=True)
        for _ in range(50):
            try:
                await asyncio.to_thread(self._ray.get_actor, _actor_name(plan))
            except ValueError:
                return
            await asyncio.sleep(0.1)


def _actor_name(plan: NodePlan) -> str:
    return f"polar-node-{plan.node_id}"
