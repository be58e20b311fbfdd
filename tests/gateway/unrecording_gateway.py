"""A gateway in its own process, to be killed: `python -m tests.gateway.unrecording_gateway DB [away]`.

Prints its port. With `away`, its database cannot be used from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from tests.fakes.store_faults import away
from tests.gateway.shared_gateways import open_shared_store

SETTINGS = GatewaySettings(port=0)


async def main(url: str, fault: str = "") -> None:
    async with open_shared_store(url) as store, ScriptedEngine() as engine, Gateway(engine, store, SETTINGS) as gateway:
        with away(store) if fault == "away" else contextlib.nullcontext():
            print(gateway.port, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
