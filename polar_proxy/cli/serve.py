"""`polar serve`: the gateway and the HTTP API. `polar session new`: a key for an agent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption, PastReasoningOption, PromptModeOption
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.api import ApiContext
    from polar_proxy.gateway import Gateway

session_app = typer.Typer(help="Make session keys.", no_args_is_help=True)


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes any free port.")] = None,
    engine: Annotated[str | None, typer.Option(help="local, vllm, openai, or module:Class.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Where the engine listens (vllm, openai).")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm, openai: the served name.")] = None,
    require_known_keys: Annotated[
        bool | None, typer.Option("--require-known-keys", help="Refuse unknown keys on loopback too.")
    ] = None,
    prompt_mode: PromptModeOption = None,
    past_reasoning: PastReasoningOption = None,
    db: DbOption = None,
    work: Annotated[bool, typer.Option("--work", help="Also run the rollouts that `polar submit` queues.")] = False,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Agents at a time, with --work.")] = None,
    backlog: Annotated[
        int | None, typer.Option(min=1, help="With --work: finished groups that may wait for a trainer.")
    ] = None,
    executor: Annotated[str, typer.Option(help="With ray, the nodes of a Ray cluster do the work.")] = "local",
    ray_address: Annotated[str, typer.Option(help="HOST:PORT of that cluster, or this machine's own.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Serve the gateway and the HTTP API until stopped. With --json, one line of JSON when it is ready."""
    settings = common.load_settings(
        db,
        gateway={
            "host": host,
            "port": port,
            "require_known_keys": require_known_keys,
            "prompt_mode": prompt_mode,
            "past_reasoning": past_reasoning,
            "shared": True if executor == "ray" else None,
        },
        engine={"kind": engine, "url": engine_url, "model": model},
        run={"concurrency": concurrency, "backlog": backlog},
    )
    if executor not in ("local", "ray"):
        raise UsageError(f"There is no executor {executor!r}: local or ray.")
    common.run_async(_serve(settings, as_json, work=work, ray_address=ray_address if executor == "ray" else None))


async def _serve(settings: Settings, as_json: bool, *, work: bool, ray_address: str | None) -> None:
    from polar_proxy.api import ApiContext, create_router
    from polar_proxy.engines.factory import make_engine
    from polar_proxy.gateway import Gateway
    from polar_proxy.rollouts import RolloutService, ServiceLimits, recover

    async with common.writer(settings) as store:
        for line in await recover(store):
            _note(line)
        async with make_engine(settings.engine) as engine, contextlib.AsyncExitStack() as stack:
            gateway = Gateway(engine, store, settings.gateway)
            service: RolloutService | None = None
            if work:
                limits = ServiceLimits.of(settings.run.concurrency, settings.admission, bake=settings.run.bake)
                limits = replace(limits, scheduler=replace(limits.scheduler, backlog=settings.run.backlog))
                service = RolloutService(store, gateway, engine, settings.harness_cache, limits=limits, note=_note)
            # Before the gateway listens: a client that waits for this server would be told that it has no API.
            api = ApiContext(store, settings, service, engine)
            gateway.include(create_router(api))
            await stack.enter_async_context(gateway)
            if service is not None:
                await stack.enter_async_context(service)
            key_file = await stack.enter_async_context(_kept(api, gateway))
            if as_json:
                ready = {
                    "url": gateway.url,
                    "db": store.display_url,
                    "model": engine.info.model,
                    "open": gateway.sessions.open_to_all,
                    "api_key_file": str(key_file),
                }
                common.print_json(ready)
            else:
                _welcome(gateway, store.display_url, engine.info.model, key_file)
            if ray_address is not None:
                from polar_proxy.rollouts.cluster import Cluster

                await stack.enter_async_context(Cluster(settings, store, ray_address, note=_note))
            # Ends by cancellation (SIGINT, SIGTERM): what is in hand then goes back into the queue.
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def _kept(api: ApiContext, gateway: Gateway) -> AsyncIterator[Path]:
    """What the HTTP API does beside answering, until the block ends; gives the file with this machine's admin key."""
    from polar_proxy.api import BackgroundLoops, local_admin_key
    from polar_proxy.api.metrics import ServiceCollector

    service = api.service
    key_file = await local_admin_key(api.store, api.settings.home)
    async with BackgroundLoops(api) as keeping:
        counts = (lambda: None) if service is None else service.counts
        gateway.metrics.registry.register(ServiceCollector(counts, lambda: keeping.feed_depth))
        yield key_file


def _note(line: str) -> None:
    common.err.print(f"[dim]{escape(line)}[/]", highlight=False)


def _welcome(gateway: Gateway, db: str, model: str, key_file: Path) -> None:
    say = common.out.print
    say(f"[bold]Polar[/] serves {escape(model)} at {gateway.url} and records into {escape(db)}", highlight=False)
    say("point an agent at it:", highlight=False)
    say(f"  export OPENAI_BASE_URL={gateway.url}/v1", highlight=False, soft_wrap=True)
    if gateway.sessions.open_to_all:
        say("  export OPENAI_API_KEY=any-name-you-like    # one session per key", highlight=False)
    else:
        say("  export OPENAI_API_KEY=$(polar session new)   # only keys made so are taken", highlight=False)
    say(f"the API: {gateway.url}/docs, with the key in {escape(str(key_file))}", highlight=False, soft_wrap=True)
    say("then: polar sessions, polar show SESSION, polar export. Ctrl-C stops.", highlight=False)


@session_app.command("new")
def session_new(
    label: Annotated[str | None, typer.Option(help="A name to find it by.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Replaces what the client asks for.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Upper bound of one answer.")] = None,
    prompt_mode: PromptModeOption = None,
    past_reasoning: PastReasoningOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a session and print its key. The key is shown once and stored only as a hash."""
    modes = {"prompt_mode": prompt_mode, "past_reasoning": past_reasoning}
    settings = common.load_settings(db, gateway=dict(modes))  # checks them
    policy: dict[str, object] = {"temperature": temperature, "max_tokens": max_tokens}
    policy |= {name: getattr(settings.gateway, name) for name, value in modes.items() if value is not None}
    policy = {name: value for name, value in policy.items() if value is not None}

    async def make() -> tuple[str, str]:
        from polar_proxy.sessions import hash_key, new_key

        key = new_key()
        async with common.writer(settings) as store:
            session = await store.sessions.create(
                key_hash=hash_key(key), label=label, rollout_id=None, policy=policy or None, origin="key"
            )
        return session.session_id, key

    session_id, key = common.run_async(make())
    if as_json:
        common.print_json({"session_id": session_id, "key": key})
    else:
        common.err.print(f"[dim]session {session_id}; its key:[/]", highlight=False)
        typer.echo(key)
