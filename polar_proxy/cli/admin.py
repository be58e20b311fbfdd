"""`polar key`, `polar session`, `polar service`: API keys, session keys, and pausing or draining servers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import given, load_settings, with_client, with_store
from polar_proxy.cli.output import format_time, make_table, print_note, print_result
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.api_models import Role, Scope, ServiceState

key_app = typer.Typer(help="Manage keys of the HTTP API.", no_args_is_help=True)
session_app = typer.Typer(help="Create sessions for agents that you start yourself.", no_args_is_help=True)
service_app = typer.Typer(help="Pause, resume and drain servers.", no_args_is_help=True)

AllServers = Annotated[
    bool, typer.Option("--all", help="All servers of the database. Required without --url, except for status.")
]


# API keys


@key_app.command("new")
def new_key(
    role: Annotated[str, typer.Option(help="admin (everything) or trainer (read, feed, rewards, pauses).")],
    label: Annotated[str | None, typer.Option(help="A name to find the key by.")] = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Create an API key and print it. The key is shown once; only its hash is stored."""
    settings = load_settings(db)
    if role not in ("admin", "trainer"):
        raise UsageError(f"--role is admin or trainer, not {role!r}.")
    from polar_proxy.api import new_api_key
    from polar_proxy.sessions.identity import hash_key

    checked: Role = "admin" if role == "admin" else "trainer"
    key = new_api_key(checked)
    row = with_store(settings, lambda store: store.api_keys.add(hash_key(key), checked, label), create=True)
    print_result({**asdict(row), "key": key}, lambda: _print_key(f"{row.role} key {row.name}", key), as_json)


@key_app.command("list")
def list_keys(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """List all API keys, including revoked ones. The keys themselves are not stored."""
    rows = with_store(load_settings(db), lambda store: store.api_keys.all())
    table = make_table(
        ("key", "role", "created", "revoked", "label"),
        (
            (row.name, row.role, format_time(row.created_at), format_time(row.revoked_at), row.label or "")
            for row in rows
        ),
    )
    print_result({"keys": rows}, table, as_json)


@key_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="Name of the key, as `polar key list` prints it.")],
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Revoke an API key. It is refused from now on."""
    row = with_store(load_settings(db), lambda store: store.api_keys.revoke(name), create=True)
    print_result(row, lambda: print_note(f"{row.role} key {row.name} is revoked"), as_json)


# Sessions


@session_app.command("new")
def new_session(
    label: Annotated[str | None, typer.Option(help="A name to find the session by.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature; overrides what the agent asks for.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Upper limit of tokens in one answer.")] = None,
    prompt_mode: options.PromptMode = None,
    past_reasoning: options.PastReasoning = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Create a session and print its key. The key is shown once; only its hash is stored."""
    modes = given({"prompt_mode": prompt_mode, "past_reasoning": past_reasoning})
    settings = load_settings(db, gateway=modes)  # validates the modes
    policy = given({"temperature": temperature, "max_tokens": max_tokens})
    policy |= {name: getattr(settings.gateway, name) for name in modes}
    from polar_proxy.sessions.identity import hash_key, new_key

    key = new_key()
    session = with_store(
        settings,
        lambda store: store.sessions.create(key_hash=hash_key(key), label=label, policy=policy or None, origin="key"),
        create=True,
    )
    created = {"session_id": session.session_id, "key": key}
    print_result(created, lambda: _print_key(f"session {session.session_id}; its key", key), as_json)


def _print_key(title: str, key: str) -> None:
    print_note(f"{title}:")
    typer.echo(key)


# Servers


@service_app.command("status")
def service_status(url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Show the state of the server, and of all servers of its database."""
    _print_state(with_client(url, db, lambda client: client.service()), as_json)


@service_app.command("pause")
def pause_service(
    all_servers: AllServers = False,
    seconds: options.PauseFor = None,
    wait_idle: Annotated[
        float | None,
        typer.Option(help="Wait up to N seconds until no rollout runs; if some still run, nothing stays paused."),
    ] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Start no more rollouts of any job; running rollouts continue."""
    state = with_client(
        url,
        db,
        lambda client: client.pause_service(seconds=seconds, wait_idle=wait_idle, scope=_scope(all_servers)),
    )
    _print_state(state, as_json)


@service_app.command("resume")
def resume_service(
    all_servers: AllServers = False, url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False
) -> None:
    """Start rollouts again, after a pause or a drain of the same servers."""
    state = with_client(url, db, lambda client: client.resume_service(scope=_scope(all_servers)))
    _print_state(state, as_json)


@service_app.command("drain")
def drain_service(
    all_servers: AllServers = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Start rollouts again if some still run after N seconds.")
    ] = 600.0,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Start no more rollouts, and wait until none runs."""
    state = with_client(url, db, lambda client: client.drain(timeout=timeout, scope=_scope(all_servers)))
    _print_state(state, as_json)


def _scope(all_servers: bool) -> Scope:
    return "all" if all_servers else "server"


def _print_state(state: ServiceState, as_json: bool) -> None:
    own = "no rollout workers" if state.state is None else f"{state.state}, {state.in_flight} rollouts in flight"
    fleet = f"all servers: {state.fleet.state}, {state.fleet.in_flight} rollouts in flight"
    print_result(state, f"this server: {own}\n{fleet}", as_json)
