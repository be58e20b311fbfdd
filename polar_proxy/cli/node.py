"""`polar node`: give this machine to a Ray cluster for agents and their sandboxes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from typing import Annotated

import typer

from polar_proxy.cli import common
from polar_proxy.errors import PolarError, UsageError

_GONE_SECONDS = 2.0
"""By then Ray's workers have noticed that their node is gone, and are dead owners."""


class NodeEndedError(PolarError):
    """Ray ended by itself."""


def node(
    ray_options: Annotated[
        list[str] | None, typer.Argument(help="After --, for `ray start`: its ports, object store, ...")
    ] = None,
    *,
    ray_address: Annotated[str, typer.Option(help="HOST:PORT of the cluster (what `ray start --head` says).")],
    sandboxes: Annotated[
        int | None, typer.Option(min=1, help="Agents at a time; default by processors and free memory.")
    ] = None,
    scoring: Annotated[
        int | None, typer.Option(min=1, help="Rollouts scored here for other nodes at a time; default: processors.")
    ] = None,
) -> None:
    """Join a Ray cluster with this machine's room for sandboxes, until stopped.

    `polar serve --executor ray` then works here too: a gateway, agents, evaluators. What the engine is on this machine
    may be said by POLAR_ENGINE__URL or polar.toml here."""
    common.run_async(_join(ray_address, sandboxes, scoring, ray_options or []))


async def _join(address: str, sandboxes: int | None, scoring: int | None, options: list[str]) -> None:
    from polar_proxy.rollouts.admission import free_memory_mb
    from polar_proxy.rollouts.cluster import SANDBOX_RESOURCE, SCORING_RESOURCE, agent_capacity
    from sandboxes import orphans

    if importlib.util.find_spec("ray") is None:
        raise UsageError("Many machines need Ray: pip install 'polar-proxy[ray]' on each of them.")
    cpus = os.cpu_count() or 1
    room = sandboxes or agent_capacity(cpus, (free_memory_mb() or 0) << 20)
    if room < 1:
        raise UsageError("This machine has not the memory for one sandbox: name --sandboxes if you know better.")
    common.err.print(f"[dim]{room} agents at a time[/]", highlight=False)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--address", address, "--resources", json.dumps({SANDBOX_RESOURCE: room, SCORING_RESOURCE: scoring or cpus})),
        *options,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        code = await process.wait()
        raise NodeEndedError(f"Ray ended here (exit {code}): is there a cluster at {address}?")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        await asyncio.sleep(_GONE_SECONDS)
        for item in await orphans.sweep():
            common.err.print(f"[dim]removed a leftover {item}[/]", highlight=False)
