"""`polar serve`: the gateway, the HTTP API and optional rollout workers. `polar node`: a machine of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import (
    database_url,
    import_named_code,
    is_local_url,
    load_settings,
    observe_warnings,
    open_database,
    run_async,
)
from polar_proxy.cli.output import out, print_json, print_note, styled
from polar_proxy.config import Settings
from polar_proxy.errors import PolarError, UsageError
from polar_proxy.terminal import configure_logging

if TYPE_CHECKING:
    from polar_proxy.api import ApiContext
    from polar_proxy.gateway import Gateway

log = logging.getLogger(__name__)

_RAY_EXIT_SECONDS = 2.0
"""Seconds to wait after Ray has ended, because Ray's worker processes end a little later. Only after their end can the
sandboxes of these processes be removed as orphans."""


class NodeEndedError(PolarError):
    """Ray ended on this machine."""


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 takes any free port.")] = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    require_known_keys: Annotated[
        bool | None, typer.Option("--require-known-keys", help="Refuse unknown session keys on loopback too.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sample at this temperature, whatever the agents ask for.")
    ] = None,
    prompt_mode: options.PromptMode = None,
    past_reasoning: options.PastReasoning = None,
    hooks: options.Hooks = None,
    db: options.Db = None,
    rollout_workers: Annotated[
        int | None, typer.Option(min=1, help="Also run the rollouts that `polar submit` queues, N at a time.")
    ] = None,
    backlog: Annotated[
        int | None,
        typer.Option(min=1, help="Start no rollout while N finished groups wait for a trainer."),
    ] = None,
    executor: Annotated[str, typer.Option(help="ray: run the rollouts on the nodes of a Ray cluster.")] = "local",
    ray_address: Annotated[
        str, typer.Option(help="HOST:PORT of the Ray cluster; auto: the cluster of this machine.")
    ] = "auto",
    allow_code: options.AllowCode = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
    as_json: options.AsJson = False,
) -> None:
    """Serve the gateway and the HTTP API until stopped. --json prints one JSON document when the server is ready."""
    import_named_code(engine, hooks, *(allow_code or ()))
    settings = load_settings(
        db,
        allow_code=allow_code,
        gateway={
            "host": host,
            "port": port,
            "require_known_keys": require_known_keys,
            "temperature": temperature,
            "prompt_mode": prompt_mode,
            "past_reasoning": past_reasoning,
            "hooks": hooks,
            "shared": True if executor == "ray" else None,
        },
        engine={"kind": engine, "url": engine_url, "model": model},
        run={"concurrency": rollout_workers, "backlog": backlog},
        log={"level": log_level, "format": log_format},
    )
    configure_logging(settings.log.level or "info", settings.log.format)
    options.require_choice("executor", executor, ("local", "ray"))
    ray = ray_address if executor == "ray" else None
    run_async(_serve(settings, as_json, with_workers=rollout_workers is not None, ray_address=ray))


async def _serve(settings: Settings, as_json: bool, *, with_workers: bool, ray_address: str | None) -> None:
    from polar_proxy.api import ApiContext, BackgroundLoops, local_admin_key
    from polar_proxy.api.service import ServiceCollector
    from polar_proxy.engines.factory import make_engine, open_engines
    from polar_proxy.export.processes import ExportProcesses
    from polar_proxy.gateway import Gateway
    from polar_proxy.rollouts import RolloutService, ServiceLimits, recover
    from polar_proxy.telemetry import traced

    async with open_database(settings, create=True) as store, contextlib.AsyncExitStack() as stack:
        for line in await recover(store):
            log.warning("%s", line)
        engine = await stack.enter_async_context(make_engine(settings.engine))
        engines = await stack.enter_async_context(open_engines(settings.engines))
        gateway = Gateway(engine, store, settings.gateway, engines=engines, routes=settings.routes)
        tracing = traced(settings.telemetry, store, gateway.observe, gateway.sessions.rollout_of)
        on_rollout_end = await stack.enter_async_context(tracing)
        service: RolloutService | None = None
        if with_workers:
            limits = ServiceLimits.of(settings, backlog=settings.run.backlog)
            service = RolloutService.of(
                settings, store, gateway, engine, limits=limits, note=log.info, on_rollout_end=on_rollout_end
            )
        # The API is added before the gateway listens, so that a client that waits for this server never gets a 404.
        exports = await stack.enter_async_context(ExportProcesses(store.database.url))
        context = ApiContext(store, settings, service, engine, engines, exports=exports)
        _add_api_and_pages(gateway, context)
        observe_warnings(gateway, settings, log.warning)
        # Also before the gateway listens: the key, and the sandbox's test, which takes seconds.
        key_file = await local_admin_key(store, settings.home)
        if service is not None:
            await service.test_sandbox(settings.run.sandbox)
        await stack.enter_async_context(gateway)
        if service is not None:
            await stack.enter_async_context(service)
        loops = await stack.enter_async_context(BackgroundLoops(context))
        gateway.metrics.registry.register(ServiceCollector(service, lambda: loops.feed_depth))
        if as_json:
            _print_ready(gateway, store.display_url, engine.info.model, key_file)
        else:
            _print_welcome(gateway, settings, store.display_url, engine.info.model, key_file)
        if ray_address is not None:
            from polar_proxy.rollouts.cluster import Cluster

            await stack.enter_async_context(Cluster(settings, store, ray_address, note=log.info))
        # A signal cancels this wait; rollouts in flight then go back to the queue.
        await gateway.ended()


def _add_api_and_pages(gateway: Gateway, context: ApiContext) -> None:
    from polar_proxy.api import API_ROUTES, server_state
    from polar_proxy.view import create_view_router

    gateway.include(API_ROUTES, **server_state(context))
    gateway.include(create_view_router(context, open_on_loopback=gateway.sessions.open_to_all))


def _print_ready(gateway: Gateway, db: str, model: str, key_file: Path) -> None:
    print_json(
        {
            "url": gateway.url,
            "db": db,
            "model": model,
            "open": gateway.sessions.open_to_all,
            "api_key_file": str(key_file),
        }
    )


def _print_welcome(gateway: Gateway, settings: Settings, db: str, model: str, key_file: Path) -> None:
    """Print what is served, and commands to continue with. In a shell with the same POLAR_HOME, they work exactly as
    they are printed."""
    from polar_proxy.engines.bundled import ABILITY, is_bundled

    out.print(styled("[bold]Polar[/] serves {} at {} and records into {}", model, gateway.url, db), soft_wrap=True)
    if is_bundled(settings.engine):
        out.print(ABILITY, soft_wrap=True)
    out.print("point an agent at it:")
    plain = load_settings()
    if plain.url != gateway.url and (plain.url is not None or database_url(plain) != database_url(settings)):
        # Without this variable, the commands below would use another server or database.
        out.print(f"  export POLAR_URL={gateway.url}    # for the polar commands below", soft_wrap=True)
        if not is_local_url(gateway.url):
            out.print(f"  export POLAR_API_KEY=$(cat {shlex.quote(str(key_file))})", soft_wrap=True)
    out.print(f"  export OPENAI_BASE_URL={gateway.url}/v1", soft_wrap=True)
    if gateway.sessions.open_to_all:
        out.print("  export OPENAI_API_KEY=any-name-you-like    # one session per key, with the key as label")
    else:
        out.print("  export OPENAI_API_KEY=$(polar session new)   # unknown keys are refused")
    out.print(f"see what is recorded: {gateway.url}/", soft_wrap=True)
    out.print(f"the API: {gateway.url}/docs, with the key in {key_file}", soft_wrap=True)
    out.print("then: polar sessions, polar show last, polar export. Ctrl-C stops.")


def node(
    ray_options: Annotated[
        list[str] | None, typer.Argument(help="Options for `ray start`, after --: ports, object store, ...")
    ] = None,
    *,
    ray_address: Annotated[str, typer.Option(help="HOST:PORT of the cluster, as `ray start --head` prints it.")],
    sandboxes: Annotated[
        int | None,
        typer.Option(min=1, help="Run at most N agents at a time. Default: as processors and free memory allow."),
    ] = None,
    scoring: Annotated[
        int | None,
        typer.Option(min=1, help="Score at most N rollouts of other nodes at a time. Default: number of processors."),
    ] = None,
) -> None:
    """Add this machine to a Ray cluster until stopped.

    `polar serve --executor ray` then runs a gateway, agents and evaluators here too. If this machine reaches the engine
    at another address, set this address here: by POLAR_ENGINE__URL, or by `engine.url` in polar.toml.
    """
    run_async(_join_cluster(ray_address, sandboxes, scoring, ray_options or []))


async def _join_cluster(address: str, sandboxes: int | None, scoring: int | None, ray_options: list[str]) -> None:
    from polar_proxy.rollouts.admission import free_memory_mb
    from polar_proxy.rollouts.cluster import SANDBOX_RESOURCE, SCORING_RESOURCE, agent_capacity
    from sandboxes import orphans

    if importlib.util.find_spec("ray") is None:
        raise UsageError("`polar node` needs Ray on every machine: pip install 'polar-proxy[ray]'.")
    cpus = os.cpu_count() or 1
    capacity = sandboxes or agent_capacity(cpus, (free_memory_mb() or 0) << 20)
    if capacity < 1:
        raise UsageError("This machine has too little free memory for one sandbox. Set --sandboxes to override this.")
    print_note(f"{capacity} agents at a time")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--address", address),
        *("--resources", json.dumps({SANDBOX_RESOURCE: capacity, SCORING_RESOURCE: scoring or cpus})),
        *ray_options,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        code = await process.wait()
        raise NodeEndedError(f"Ray ended on this machine (exit code {code}). Is there a Ray cluster at {address}?")
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        await asyncio.sleep(_RAY_EXIT_SECONDS)
        for item in await orphans.sweep():
            print_note(f"removed a leftover {item}")
