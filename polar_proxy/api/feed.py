"""Routes of the trainer feed: finished groups are leased, and acknowledged or given back."""

from __future__ import annotations

import asyncio
import time

from fastapi import Request

from polar_proxy import api_models as m
from polar_proxy.api import serializers
from polar_proxy.api.context import ApiContext, Routers

_LOOK_SECONDS = 0.25


def add(rooms: Routers, api: ApiContext) -> None:
    trainer, store = rooms.trainer, api.store

    @trainer.post("/feed/lease", tags=["feed"])
    async def lease(body: m.LeaseRequest, request: Request) -> m.LeaseResponse:
        """Finished groups, oldest first, for the consumer alone until each lease ends. What is too stale is dropped
        instead. With `wait`, the answer is kept back so long until there is one."""
        deadline = time.monotonic() + body.wait
        dropped: list[str] = []
        while True:
            # The first look is a whole one: it says what a bad request lacks, and what was dropped.
            offer = await store.feed.lease(
                body.consumer,
                body.limit,
                body.seconds,
                policy_version=body.policy_version,
                max_staleness=body.max_staleness,
            )
            dropped += offer.dropped
            if offer.leases or not await _until_waiting(api, request, deadline):
                return m.LeaseResponse(leases=[serializers.lease(one) for one in offer.leases], dropped=dropped)

    @trainer.post("/feed/leases/{lease_id}/ack", tags=["feed"])
    async def acknowledge(lease_id: str) -> m.LeaseEndResponse:
        """The group was trained on: it is never offered again. 409 `lease_lost` where the lease has run out."""
        await store.feed.acknowledge(lease_id)
        return m.LeaseEndResponse(lease_id=lease_id, outcome="acknowledged")

    @trainer.post("/feed/leases/{lease_id}/return", tags=["feed"])
    async def give_back(lease_id: str) -> m.LeaseEndResponse:
        """The group will not be used: it is offered again. 409 `lease_lost` where the lease has run out."""
        await store.feed.release(lease_id)
        return m.LeaseEndResponse(lease_id=lease_id, outcome="returned")

    @trainer.post("/feed/leases/{lease_id}/extend", tags=["feed"])
    async def extend(lease_id: str, body: m.ExtendRequest) -> m.LeaseExtendResponse:
        """Keep the group for so long from now. 409 `lease_lost` where the lease has run out."""
        return m.LeaseExtendResponse(lease_id=lease_id, expires_at=await store.feed.extend(lease_id, body.seconds))

    @trainer.get("/feed", tags=["feed"])
    async def state() -> m.FeedState:
        """How many groups are open, waiting, leased, delivered, dropped; and why they were dropped."""
        return m.FeedState(depth=await store.feed.depth(), dropped_reasons=await store.feed.drop_reasons())


async def _until_waiting(api: ApiContext, request: Request, deadline: float) -> bool:
    """Whether there may be a group before the deadline, the end of the server, or that of the connection: what is
    leased to somebody who is gone is nobody's until the lease runs out."""
    while (left := deadline - time.monotonic()) > 0 and not api.closing.is_set():
        if await request.is_disconnected():
            return False
        if await api.store.feed.any_waiting():
            return True
        await asyncio.sleep(min(_LOOK_SECONDS, left))
    return False
