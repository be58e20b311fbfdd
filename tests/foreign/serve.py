"""Run a command against a gateway with the obliging engine: `python -m tests.foreign.serve COMMAND ...`.

The command gets the gateway's address in the environment variable POLAR_URL. The records are in a temporary folder.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from polar_proxy.config import GatewaySettings
from polar_proxy.gateway import Gateway
from polar_proxy.store import open_store
from tests.foreign.obliging_engine import obliging_engine


async def run(command: list[str]) -> int:
    """Return the exit code of the command."""
    with tempfile.TemporaryDirectory(prefix="polar-foreign-") as folder:
        async with (
            open_store(str(Path(folder) / "polar.db")) as store,
            obliging_engine() as engine,
            Gateway(engine, store, GatewaySettings(port=0)) as gateway,
        ):
            process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "POLAR_URL": gateway.url})
            return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
