"""A gateway in its own process, to be killed: `python -m tests.gateway.killable_gateway DB`. Prints its port.

The first token of an answer takes minutes; the lease of a call lasts one second.
"""

from __future__ import annotations

import asyncio
import sys

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine, ScriptedReply
from polar_proxy.gateway import Gateway, in_flight
from tests.gateway.shared_gateways import open_shared_store


async def main(url: str) -> None:
    in_flight.LEASE_SECONDS, in_flight.RENEW_SECONDS = 1.0, 0.2
    settings = GatewaySettings(port=0, require_known_keys=True, shared=True)
    engine = ScriptedEngine(lambda request: ScriptedReply("too late", wait=300.0))
    async with open_shared_store(url) as store, engine, Gateway(engine, store, settings) as gateway:
        print(gateway.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
