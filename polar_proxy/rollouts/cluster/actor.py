"""The actor of a node. Ray starts it, and starts it again when its process dies."""

from __future__ import annotations

import asyncio
import logging

from polar_proxy.rollouts.cluster.node import NodeConfig, NodeState, run_node
from polar_proxy.rollouts.cluster.scoring import RayScorer
from sandboxes import orphans

log = logging.getLogger(__name__)


class NodeActor:
    """Works from its creation until `stop`. Its methods run on its event loop, beside the work."""

    def __init__(self, config: NodeConfig, needs: dict[str, float]) -> None:
        """`needs`: see `RayScorer`."""
        logging.basicConfig(level=logging.INFO)
        self._config = config
        self._elsewhere = RayScorer(needs)
        self._stopping = asyncio.Event()
        self._state: asyncio.Future[NodeState] = asyncio.get_running_loop().create_future()
        self._work = asyncio.create_task(self._run())

    async def state(self) -> NodeState:
        """Waits until it works. Raises what kept it from working."""
        return await asyncio.shield(self._state)

    async def ended(self) -> None:
        """Returns when it was stopped. Raises what ended it otherwise."""
        await asyncio.shield(self._work)

    async def stop(self) -> None:
        """Put what is in hand back into the queue and close everything."""
        self._stopping.set()
        await asyncio.wait([self._work])

    async def sweep(self) -> list[str]:
        """Remove what dead processes of this machine left; another node of the same machine may have been killed."""
        return [str(item) for item in await orphans.sweep()]

    async def _run(self) -> None:
        try:
            async with run_node(self._config, self._elsewhere) as made:
                self._state.set_result(made.state())
                await self._stopping.wait()
        except BaseException as error:
            if not self._state.done():
                self._state.set_exception(error)
            raise
