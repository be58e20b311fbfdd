"""`polar key`, `session`, `service` and `db`: API keys, sessions, pauses of servers, and maintenance of the
database."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import (
    database_url,
    given,
    load_settings,
    make_request,
    read_store_or_server,
    run_async,
    with_client,
    with_store,
)
from polar_proxy.cli.output import format_time, make_table, print_note, print_result, progress_bars
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import SessionBudget
from polar_proxy.terminal import one_line

if TYPE_CHECKING:
    from polar_proxy.api_models import KeyList, Scope, ServiceState
    from polar_proxy.config import Settings
    from polar_proxy.store import Store
    from polar_proxy.store.maintenance.archive_import import ArchiveCounts
    from polar_proxy.store.maintenance.repository import PruneResult

key_app = typer.Typer(help="Manage keys of the HTTP API.", no_args_is_help=True)
session_app = typer.Typer(help="Create sessions for agents that you start yourself.", no_args_is_help=True)
service_app = typer.Typer(help="Pause, resume and drain servers.", no_args_is_help=True)
db_app = typer.Typer(help="Inspect, check, prune and archive the database.", no_args_is_help=True)

AllServers = Annotated[
    bool, typer.Option("--all", help="Address all servers that use the database. Without --url, --all is required.")
]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


# API keys


@key_app.command("new")
def new_key(
    role: Annotated[str, typer.Option(help="admin (everything) or trainer (read, use the feed, add rewards, pause).")],
    label: Annotated[str | None, typer.Option(help="A name to find the key by.")] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Create an API key and print it. The key is shown once; only its hash is stored."""
    from polar_proxy.api_models import KeyRequest

    if role not in ("admin", "trainer"):
        raise UsageError(f"--role is admin or trainer, not {role!r}.")
    request = make_request(KeyRequest, role=role, label=label)
    created = with_client(url, db, lambda client: client.new_key(request), create=True)
    print_result(created, lambda: _print_key(f"{created.role} key {created.name}", created.key), as_json)


@key_app.command("list")
def list_keys(url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False) -> None:
    """List all API keys, including revoked ones. The keys themselves are not stored."""

    async def from_store(store: Store, settings: Settings) -> KeyList:
        from polar_proxy.records import list_keys

        return await list_keys(store)

    found = read_store_or_server(url, db, from_store, lambda client: client.keys())
    table = make_table(
        ("key", "role", "created", "revoked", "label"),
        (
            (row.name, row.role, format_time(row.created_at), format_time(row.revoked_at), row.label or "")
            for row in found.keys
        ),
    )
    print_result(found, table, as_json)


@key_app.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="Name of the key, as `polar key list` prints it.")],
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Revoke an API key. It is refused from now on."""
    row = with_client(url, db, lambda client: client.revoke_key(name), create=True)
    print_result(row, lambda: print_note(f"{row.role} key {row.name} is revoked"), as_json)


# Sessions


@session_app.command("new")
@options.model_options(SessionBudget)
def new_session(
    label: Annotated[str | None, typer.Option(help="A name to find the session by.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sample at this temperature, whatever the agent's requests ask for.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Upper limit of tokens in one answer.")] = None,
    prompt_mode: options.PromptMode = None,
    past_reasoning: options.PastReasoning = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
    *,
    rollout_options: dict[str, Any],
) -> None:
    """Create a session and print its key. The key is shown once; only its hash is stored."""
    from polar_proxy.api_models import SessionRequest

    modes = given({"prompt_mode": prompt_mode, "past_reasoning": past_reasoning})
    settings = load_settings(gateway=modes)  # validates the modes
    modes = {name: getattr(settings.gateway, name) for name in modes}
    chosen = given({"label": label, "temperature": temperature, "max_tokens": max_tokens}) | modes | rollout_options
    request = make_request(SessionRequest, **chosen)
    created = with_client(url, db, lambda client: client.new_session(request), create=True)
    print_result(created, lambda: _print_key(f"session {created.session_id}; its key", created.key), as_json)


def _print_key(title: str, key: str) -> None:
    print_note(f"{title}:")
    typer.echo(key)


# Servers


@service_app.command("status")
def service_status(url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Show the state of the server, and of all servers of its database."""

    async def from_store(store: Store, settings: Settings) -> ServiceState:
        from polar_proxy.records import database_service_state

        return await database_service_state(store)

    _print_state(read_store_or_server(url, db, from_store, lambda client: client.service()), as_json)


@service_app.command("pause")
def pause_service(
    all_servers: AllServers = False,
    seconds: options.PauseFor = None,
    wait_idle: Annotated[
        float | None,
        typer.Option(help="Wait up to N seconds until no rollout runs. If a rollout still runs then, undo the pause."),
    ] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Pause a server: it starts no more rollouts of any job. Running rollouts continue."""
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
    """End a pause or a drain of a server, so that it starts rollouts again."""
    state = with_client(url, db, lambda client: client.resume_service(scope=_scope(all_servers)))
    _print_state(state, as_json)


@service_app.command("drain")
def drain_service(
    all_servers: AllServers = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Undo the pause if some rollouts still run after N seconds.")
    ] = 600.0,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Pause a server, and wait until no rollout runs."""
    state = with_client(url, db, lambda client: client.drain(timeout=timeout, scope=_scope(all_servers)))
    _print_state(state, as_json)


def _scope(all_servers: bool) -> Scope:
    return "all" if all_servers else "server"


def _print_state(state: ServiceState, as_json: bool) -> None:
    own = "no rollout workers" if state.state is None else f"{state.state}, {state.in_flight} rollouts in flight"
    fleet = f"all servers: {state.fleet.state}, {state.fleet.in_flight} rollouts in flight"
    print_result(state, f"this server: {own}\n{fleet}", as_json)


# The database


@db_app.command("path")
def print_path(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Print the URL of the database that is used."""
    from polar_proxy.store import display_url, normalise_url

    url = display_url(normalise_url(database_url(load_settings(db))))
    print_result({"db": url}, url, as_json)


@db_app.command("upgrade")
def upgrade_schema(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Create the database, or upgrade it to this version's schema."""
    from polar_proxy.store import display_url, normalise_url, upgrade

    url = database_url(load_settings(db))
    revision = run_async(upgrade(url))
    found = {"db": display_url(normalise_url(url)), "revision": revision}
    print_result(found, f"schema revision {revision}", as_json)


@db_app.command("stats")
def print_stats(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Print the numbers of rows, bytes and tokens."""
    stats = with_store(load_settings(db), lambda store: store.maintenance.stats())
    lines = []
    for name, value in stats.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(one_line(f"  {key}: {number}") for key, number in value.items())]
        else:
            lines.append(one_line(f"{name}: {value}"))
    print_result(stats, "\n".join(lines), as_json)


@db_app.command("vacuum")
def vacuum(
    full: Annotated[bool, typer.Option("--full", help="Rewrite the whole file. Writers wait meanwhile.")] = False,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove rows that nothing refers to, and free their space. Gateways may keep writing."""
    with progress_bars() as update:
        done = with_store(
            load_settings(db), lambda store: store.maintenance.vacuum(full=full, progress=update), create=True
        )
    lines = [
        f"removed {done.nodes} nodes, {done.settings} settings, {done.engines} engines",
        f"{done.bytes_before} bytes before, {done.bytes_after} now",
    ]
    if done.free_bytes and not full:
        lines.append(f"{done.free_bytes} bytes are free within the file; `polar db vacuum --full` releases them")
    print_result(done, "\n".join(lines), as_json)


@db_app.command("prune")
def prune(
    older_than: Annotated[
        str,
        typer.Option(
            metavar="AGE", help="Minimum time since the work ended, such as 30d, 12h or 2w. 0s: remove all ended work."
        ),
    ],
    where: options.Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Remove rollouts and sessions that ended long ago, with everything that belongs to them."""
    before = time.time() - parse_age(older_than)

    async def work(store: Store) -> tuple[PruneResult, str | None]:
        with progress_bars() as update:
            done = await store.maintenance.prune(before, where=where, dry_run=dry_run, progress=update)
        if where is None or done.rollouts:
            return done, None
        if await store.rollouts.find(where=where, limit=1):
            return done, f"Rollouts match the conditions, but none of them ended more than {older_than} ago."
        return done, await store.rollouts.explain_no_match(where)

    done, note = with_store(load_settings(db), work, create=True)
    what = (
        f"{len(done.rollouts)} rollouts and {len(done.sessions)} sessions with {done.calls} calls, {done.files} files"
    )
    text = f"would remove {what}" if dry_run else f"removed {what}"
    if done.calls and not dry_run:
        text += "\n`polar db vacuum` frees their space"
    if note is not None:
        text += f"\n{one_line(note)}"
    print_result({**asdict(done), "dry_run": dry_run, "note": note}, text, as_json)


@db_app.command("verify")
def verify(db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Check that all stored data can be decoded and matches its hashes and counts. The exit code is 1 if a fault was
    found."""
    with progress_bars() as update:
        faults = with_store(load_settings(db), lambda store: store.maintenance.verify(update))
    lines = [one_line(f"{fault.what}: {fault.problem}") for fault in faults]
    lines.append(f"{len(faults)} faults" if faults else "no faults found")
    print_result({"faults": faults}, "\n".join(lines), as_json, good=not faults)


@db_app.command("export")
def export_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write.")],
    where: options.Where = None,
    session: options.Sessions = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Write the selected data, by default everything, to one archive for `polar db import`. Keys are left out."""
    counts = with_store(
        load_settings(db),
        lambda store: store.archive.export_archive(file, where=where, sessions=session or (), overwrite=overwrite),
    )
    _print_counts(counts, "written", as_json)


@db_app.command("import")
def import_archive(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An archive of `polar db export`.")],
    max_gb: Annotated[int, typer.Option(min=1, help="Refuse an archive that unpacks to more than N GiB.")] = 64,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Import an archive. Existing data is kept. Everything in the archive is checked: if any of it is invalid or
    contradicts existing data, nothing is imported. Rollouts that had not ended arrive as cancelled, and keys are left
    out."""
    from polar_proxy.export import archives

    with progress_bars() as update:
        counts = with_store(
            load_settings(db),
            lambda store: archives.import_archive(store, file, max_bytes=max_gb << 30, progress=update),
            create=True,
        )
    _print_counts(counts, "new", as_json)


def parse_age(text: str) -> float:
    """Return an age such as `30d` in seconds. Raises UsageError if it is malformed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not an age: write a number and one of {', '.join(_UNITS)}, such as 30d.")
    return float(match[1]) * _UNITS[match[2]]


def _print_counts(counts: ArchiveCounts, what: str, as_json: bool) -> None:
    lines = [f"  {table}: {count}" for table, count in counts.rows.items()]
    known = f", {counts.known} were already there" if counts.known else ""
    lines.append(f"{sum(counts.rows.values())} rows {what}, {counts.files} files{known}")
    print_result(counts, "\n".join(lines), as_json)
