"""The head of a cluster: keeps one actor on each node that is worked on, and takes from the dead what they had.

The actors outlive it: when the head is killed the nodes work on, and the next head finds them by their names. When it
is stopped they are stopped, and what they have in hand goes back into the queue.

Promise: what a dead node had in hand is in the queue again as soon as Ray knows that the node is dead. Should Ray be
wrong nothing breaks: a worker that has lost a rollout changes nothing of it (`NotHeldError`). Should no head be there,
the holds run out, and any node takes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from polar_proxy.config import Settings
from polar_proxy.errors import PolarError, UsageError
from polar_proxy.rollouts.cluster.capacity import NodePlan, RayNode, plan_nodes, scoring_resources
from polar_proxy.rollouts.cluster.node import NodeConfig, NodeState
from polar_proxy.rollouts.traces import exclude_orphaned_calls
from polar_proxy.store import Store

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_AGAIN_SECONDS = 5.0
"""Before an actor that could not work is started again."""
_STOP_SECONDS = 60.0


class Cluster:
    """`async with Cluster(settings, store, address) as cluster:` works on the cluster's nodes until the block ends."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        address: str,
        *,
        attempts: int = 3,
        lease_seconds: float = 30.0,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`address`: HOST:PORT of the Ray cluster, or `auto` for the one that this machine belongs to.

        Raises UsageError for a database that other machines cannot reach."""
        if store.url.startswith("sqlite"):
            raise UsageError("Many machines need a database that all of them reach: --db postgresql://USER@HOST/NAME.")
        self._ray = _ray()
        self._settings = settings
        self._store = store
        self._address = address
        self._attempts = attempts
        self._hold_seconds = lease_seconds
        self._note = note
        self._places: dict[str, NodePlan] = {}
        self._needs: dict[str, float] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, NodeState] = {}

    @property
    def nodes(self) -> list[NodeState]:
        """Those that work now, by address."""
        return sorted(self._states.values(), key=lambda state: (state.address, state.worker))

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._connect)
        # Ray's handler would abort the process three seconds after SIGTERM, before the nodes are stopped in order.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        self._looking = asyncio.create_task(self._look_forever(), name="polar-cluster")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [self._looking, *self._keepers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(place) for place in self._places.values()))
        await asyncio.to_thread(self._ray.shutdown)

    # Ray

    def _connect(self) -> None:
        try:
            self._ray.init(
                address=self._address,
                # Of the database: two services on one cluster do not meet, a head's successor finds its nodes.
                namespace="polar-" + hashlib.sha256(self._store.display_url.encode()).hexdigest()[:16],
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"There is no Ray cluster at {self._address} that this machine belongs to ({error}). "
                "Start one with `ray start --head`, or join it with `polar node --ray-address HOST:PORT`."
            ) from error

    async def _alive(self) -> list[RayNode]:
        rows: list[dict[str, Any]] = await asyncio.to_thread(self._ray.nodes)
        return [RayNode(row["NodeID"], row["NodeManagerAddress"], row["Resources"]) for row in rows if row["Alive"]]

    def _actor(self, place: NodePlan) -> Any:
        """The node's actor, started unless it is there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from polar_proxy.rollouts.cluster.actor import NodeActor

        given = dict(place.reserved)
        memory = given.pop("memory", None)
        options = self._ray.remote(NodeActor).options(
            name=_name(place),
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            memory=memory,
            resources=given,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False),
        )
        return options.remote(self._config(place), self._needs)

    def _config(self, place: NodePlan) -> NodeConfig:
        return NodeConfig(self._settings, place.address, place.agents, lease_seconds=self._hold_seconds)

    # One keeper for each node

    async def _look_forever(self) -> None:
        told = None
        while True:
            try:
                alive = await self._alive()
            except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as refusal:
                log.error("the cluster cannot be asked for its nodes (%s); trying again", refusal)
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            self._needs = scoring_resources(alive)
            self._places = {place.node_id: place for place in plan_nodes(alive)}
            for node_id, task in list(self._keepers.items()):
                if task.done():
                    del self._keepers[node_id]
                    if not task.cancelled() and (error := task.exception()) is not None:
                        log.error("node %s is looked after anew", node_id, exc_info=error)
            for node_id, place in self._places.items():
                if node_id not in self._keepers:
                    self._keepers[node_id] = asyncio.create_task(self._keep(place), name=f"polar-node-{node_id[:8]}")
            if told != (told := len(self._places)) and not told:
                self._note("no node of the cluster takes work: see `polar node`")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _keep(self, place: NodePlan) -> None:
        """See that the node works, for as long as it lives."""
        from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

        worker: str | None = None
        try:
            while place.node_id in self._places:
                try:
                    actor = await asyncio.to_thread(self._actor, place)
                    state: NodeState = await _of(actor.state.remote())
                    if worker is not None and worker != state.worker:
                        await self._dead(worker)
                    if state.digest != self._config(place).digest:
                        self._note(f"node {place.address} worked with other settings: it is started anew")
                        await self._stop(place)
                        continue
                    worker = state.worker
                    self._states[place.node_id] = state
                    self._note(f"node {place.address}: {place.agents} agents at a time, gateway {state.url}")
                    await _of(actor.ended.remote())
                    return
                except RayTaskError as error:
                    cause = error.cause if isinstance(error.cause, PolarError) else error
                    self._note(f"node {place.address} cannot work: {cause}")
                    await self._kill(place)
                    await asyncio.sleep(_AGAIN_SECONDS)
                except (RayActorError, GetTimeoutError):  # its process died, or the whole node
                    await asyncio.sleep(_LOOK_SECONDS)
                except RayError as error:
                    self._note(f"node {place.address}: {error}")
                    await asyncio.sleep(_AGAIN_SECONDS)
                finally:
                    self._states.pop(place.node_id, None)
        finally:
            if worker is not None and place.node_id not in self._places:
                self._note(f"node {place.address} is gone")
                await self._dead(worker)

    async def _dead(self, worker: str) -> None:
        """Take back what this worker had in hand; and sweep: another node may be of the same machine."""
        taken = await self._store.queue.reclaim_from(worker, attempts=self._attempts)
        for rollout_id, attempt in taken.items():
            await exclude_orphaned_calls(self._store, rollout_id)
            row = await self._store.rollouts.get(rollout_id)
            if not attempt and row is not None:
                await self._store.groups.settle(row.group_id)
        if taken:
            self._note(f"{len(taken)} rollouts of a node that died are queued again")
        for place in list(self._places.values()):
            if place.node_id in self._states:
                with contextlib.suppress(self._ray.exceptions.RayError):  # its own keeper sees what became of it
                    actor = await asyncio.to_thread(self._actor, place)
                    await _of(actor.sweep.remote())

    async def _stop(self, place: NodePlan) -> None:
        """Stop its actor, if it has one; what it has in hand goes back into the queue."""
        try:
            actor = await asyncio.to_thread(self._ray.get_actor, _name(place))
        except ValueError:
            return
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await _of(actor.stop.remote())
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            log.warning("node %s did not stop in order: %s", place.address, error)
        await self._kill(place)

    async def _kill(self, place: NodePlan) -> None:
        """Its name is free when this returns."""
        with contextlib.suppress(ValueError):
            actor = await asyncio.to_thread(self._ray.get_actor, _name(place))
            await asyncio.to_thread(self._ray.kill, actor, no_restart=True)
        for _ in range(50):
            try:
                await asyncio.to_thread(self._ray.get_actor, _name(place))
            except ValueError:
                return
            await asyncio.sleep(0.1)


def _name(place: NodePlan) -> str:
    return f"polar-node-{place.node_id}"


async def _of(ref: Any) -> Any:
    return await asyncio.wrap_future(ref.future())


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError("Many machines need Ray: pip install 'polar-proxy[ray]' on each of them.") from error
    return ray
