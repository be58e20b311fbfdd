"""Forged archives, each of them an honest export with one change, and the effects of importing them."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import zipfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from sqlalchemy import select

from polar_proxy.errors import PolarError
from polar_proxy.export.archives import import_archive
from polar_proxy.sessions.identity import hash_key
from polar_proxy.store import Store, open_store, schema
from polar_proxy.store.encoding.packed_json import pack_small_json
from polar_proxy.traces.builders import build
from polar_proxy.traces.certificate import certify, stored_form
from tests.factories import call_record, new_rollout, new_session

KEY = "sk-polar-known-to-the-attacker"
LOCAL = "local"
"""Label of the rollout that the attacked database has already, and whose ids the attacker knows."""


@dataclass(frozen=True)
class Forgery:
    """One change of an archive: SQL on its database (`sql`), a function on its unpacked folder (`change`), or another
    way to zip it (`pack`)."""

    name: str
    sql: str = ""
    change: Callable[[Path], None] | None = None
    pack: Callable[[Path, Path], None] | None = None
    own: bool = False
    """The archive is an export of the attacked database itself, with something added."""
    harmless: bool = False
    """Whether the archive may be imported, if the import has none of the attempted effects. Others must be refused."""
    control: bool = False


@dataclass(frozen=True)
class HonestArchives:
    """Unchanged archives of two databases with one rollout each. `ours` is that of the attacked database."""

    theirs: Path
    ours: Path
    database: Path
    """Folder of the attacked database."""
    rollout_id: str
    words: dict[str, str]
    """Placeholder in a forgery's SQL -> an id that the attacker knows."""


async def make_honest_archives(folder: Path) -> HonestArchives:
    async with open_store(str(folder / "theirs" / "polar.db")) as theirs:
        await _fill(theirs, "foreign")
        await theirs.archive.export_archive(folder / "theirs.polar")
    async with open_store(str(folder / "ours" / "polar.db")) as ours:
        rollout_id, session_id = await _fill(ours, LOCAL)
        await ours.archive.export_archive(folder / "ours.polar")
        row = await ours.rollouts.get(rollout_id)
        assert row is not None
    words = {"rollout": rollout_id, "session": session_id, "group": row.group_id, "key": hash_key(KEY).hex()}
    return HonestArchives(folder / "theirs.polar", folder / "ours.polar", folder / "ours", rollout_id, words)


async def archive_damage(forgery: Forgery, honest: HonestArchives, folder: Path) -> tuple[str | None, str]:
    """Import the forged archive into a copy of the attacked database.

    Return the damage, or None, and the result."""
    file = _forge(forgery, honest, folder)
    shutil.copytree(honest.database, folder / "ours")
    async with open_store(str(folder / "ours" / "polar.db")) as ours:
        before = await _rows(ours)
        try:
            await import_archive(ours, file)
            got = "imported"
        except PolarError as error:
            return await _changes(ours, before, refused=True), f"refused: {str(error)[:160]}"
        if not forgery.harmless and not forgery.control:
            return "it was imported", got
        return await _harm(ours, before, honest.rollout_id), got


async def _fill(store: Store, label: str) -> tuple[str, str]:
    """Record one finished rollout: a session, a call, a trace, a reward and a file."""
    session_id = await new_session(store, label=label, key_hash=os.urandom(32))
    rollout_id = await new_rollout(store, session_id)
    call = call_record(session_id, messages=(b'{"role":"user","content":"%s"}' % (label.encode() * 40),))
    await store.calls.commit(call)
    made = build([call], "merged", rollout_id=rollout_id)
    certificates = {trace_id: stored_form(one) for trace_id, one in certify([call], made).items()}
    await store.traces.put(made.traces, made.excluded, "merged", session_id, rollout_id, certificates)
    await store.rewards.add(rollout_id, 0.0, "tests", {"passed": 0})
    await store.artifacts.add(rollout_id, "patch.diff", label.encode())
    await store.rollouts.update(rollout_id, status="done")
    return rollout_id, session_id


def _forge(forgery: Forgery, honest: HonestArchives, folder: Path) -> Path:
    unpacked, file = folder / "unpacked", folder / "forged.polar"
    with zipfile.ZipFile(honest.ours if forgery.own else honest.theirs) as archive:
        archive.extractall(unpacked)
    if forgery.sql:
        sql = forgery.sql
        for name, value in honest.words.items():
            sql = sql.replace(f"<{name}>", value)
        with closing(sqlite3.connect(unpacked / "polar.db")) as connection:
            connection.execute("PRAGMA foreign_keys=OFF")
            connection.executescript(sql)
            connection.commit()
    if forgery.change is not None:
        forgery.change(unpacked)
    (forgery.pack or pack_plainly)(unpacked, file)
    return file


def pack_plainly(unpacked: Path, file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(unpacked.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(unpacked).as_posix())


# ---------------------------------------------------------------- what it did


async def _rows(store: Store) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    async with store.database.reading() as connection:
        for table in schema.metadata.sorted_tables:
            found[table.name] = {repr(tuple(row)) for row in await connection.execute(select(table))}
    return found


async def _changes(store: Store, before: dict[str, set[str]], *, refused: bool = False) -> str | None:
    """Describe the first table that lost or changed rows; None if no table did. With `refused`, gained rows count
    too."""
    for table, rows in (await _rows(store)).items():
        if before[table] - rows or (refused and rows != before[table]):
            return f"rows of {table} changed"
    return None


async def _harm(store: Store, before: dict[str, set[str]], local: str) -> str | None:
    if changed := await _changes(store, before):
        return changed
    if claimed := await store.queue.claim("worker", 10, 60.0):
        return f"{claimed[0].harness} would run"
    if [row for row in await store.rollouts.find() if not row.final]:
        return "a rollout has not ended"
    if await store.sessions.by_key(hash_key(KEY)) is not None:
        return "the attacker's key opens a session"
    after = await _rows(store)
    for table in ("jobs", "callbacks", "leases", "api_keys", "job_events", "open_calls", "fleet"):
        if after[table] != before[table]:
            return f"new rows of {table}"
    if await store.feed.depth():
        return "a group waits for a trainer"
    if len(await store.rewards.of_rollout(local)) != 1 or await store.sessions.ids_of_rollout(local):
        return "a stored rollout got another reward or session"
    async with store.database.reading() as connection:
        if any("holding_for" in row for row in await connection.scalars(select(schema.groups.c.config))):
            return "a group offers its rollouts to later groups"
    if faults := await store.maintenance.verify():
        return f"verify: {faults[0].what}: {faults[0].problem}"
    return None


# ---------------------------------------------------------------- ways to change an archive


def _database(change: Callable[[sqlite3.Connection], Any]) -> Callable[[Path], None]:
    def changed(unpacked: Path) -> None:
        with closing(sqlite3.connect(unpacked / "polar.db")) as connection:
            change(connection)
            connection.commit()

    return changed


def _zstd_bomb(connection: sqlite3.Connection) -> None:
    """Replace messages by data of one kilobyte that unpacks to 1 GiB."""
    compressor = zstandard.ZstdCompressor(level=3).compressobj(size=1 << 30)
    body = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(64)) + compressor.flush()
    connection.execute(
        "UPDATE nodes SET data = ?, length = ?, chain_length = ?", (b"\x01\x88" + body, 1 << 30, 1 << 30)
    )


def _deep_json(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE rewards SET detail = ?", ('{"a":' * 100_000 + "1" + "}" * 100_000,))


def _list_for_hooks(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE calls SET hooks = ?", (pack_small_json(b"[1]"),))


def _other_message(connection: sqlite3.Connection) -> None:
    change = "UPDATE nodes SET data = ?, length = 2, chain_length = 2 WHERE kind = 'message'"
    connection.execute(change, (b"\x01\x08{}",))


def _pack(write: Callable[[zipfile.ZipFile, Path], None]) -> Callable[[Path, Path], None]:
    def packed(unpacked: Path, file: Path) -> None:
        pack_plainly(unpacked, file)
        with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
            write(archive, unpacked)

    return packed


def _link(archive: zipfile.ZipFile, unpacked: Path) -> None:
    digest = hashlib.sha256(b"/etc/passwd").hexdigest()
    entry = zipfile.ZipInfo(f"artifacts/{digest[:2]}/{digest}")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(entry, "/etc/passwd")


def _artifact_bomb(archive: zipfile.ZipFile, unpacked: Path) -> None:
    """Add an artifact of 3 GiB of zeros, 3 MB in the archive, whose name is its correct hash."""
    digest, chunk = hashlib.sha256(), bytes(1 << 24)
    for _ in range(192):
        digest.update(chunk)
    name = digest.hexdigest()
    with archive.open(f"artifacts/{name[:2]}/{name}", "w", force_zip64=True) as out:
        for _ in range(192):
            out.write(chunk)


def _database_bomb(unpacked: Path) -> None:
    with (unpacked / "polar.db").open("ab") as file:
        for _ in range(128):
            file.write(bytes(1 << 24))


def _newer_schema(connection: sqlite3.Connection) -> None:
    connection.execute("UPDATE polar_schema SET version_num = '9999'")


_CONFIG = '{"harness":"shell:touch /tmp/polar-was-here","sandbox":"process"}'
_REWARD = "INSERT INTO rewards SELECT 'rew_forged', '<rollout>', NULL, NULL, NULL, 'tests', 1.0, '{}', 1.0"
_SESSION_REWARD = "INSERT INTO rewards SELECT 'rew_forged', NULL, '<session>', NULL, NULL, 'tests', 1.0, '{}', 1.0"
_REMARK = "INSERT INTO remarks SELECT 'rem_forged', '<rollout>', NULL, 'note', 'x', NULL, 'admin', 1.0"
_TASK_2 = "UPDATE groups SET task_id='t2'; UPDATE rollouts SET task_id='t2';"
"""A task of another name is new to the attacked database."""
_INTERNAL = "http://169.254.169.254/latest/meta-data"

FORGERIES: tuple[Forgery, ...] = (
    Forgery("honest_archive", control=True),
    # Things that would run, open or be delivered
    Forgery(
        "queued_rollout_with_shell",
        f"UPDATE rollouts SET status='queued', harness='shell x', sandbox='process', config='{_CONFIG}', attempt=1;",
        harmless=True,
    ),
    Forgery(
        "running_rollout_of_a_dead_worker",
        "UPDATE rollouts SET status='running', claimed_by='x', lease_expires_at=1.0, owner_host=NULL, owner_pid=NULL;",
        harmless=True,
    ),
    Forgery("foreign_key_hash", "UPDATE sessions SET key_hash=X'<key>', closed_at=NULL;", harmless=True),
    Forgery(
        "group_for_the_trainer",
        "UPDATE groups SET delivery='waiting', status='finished', job_id='job_x';",
        harmless=True,
    ),
    Forgery(
        "rollouts_kept_for_later_groups", """UPDATE groups SET config='{"holding_for":"group_x"}';""", harmless=True
    ),
    Forgery(
        "job_and_callback",
        f"""
        INSERT INTO jobs SELECT 'job_x', NULL, NULL, '{{}}', 9, 'open', NULL, 1.0, NULL, NULL, '{_INTERNAL}';
        INSERT INTO callbacks SELECT 'cb_x', 'job_x', NULL, 'job.ended', NULL, 0, 1.0, 1.0, NULL, NULL;""",
        harmless=True,
    ),
    Forgery("admin_key", "INSERT INTO api_keys SELECT X'<key>', 'admin', NULL, 1.0, NULL;", harmless=True),
    Forgery(
        "lease_of_a_local_group",
        "INSERT INTO leases SELECT 'l', '<group>', 'x', NULL, 1.0, 9e9, NULL, NULL;",
        harmless=True,
    ),
    # Content that is not what its id says
    Forgery("message_is_not_its_hash", change=_database(_other_message)),
    Forgery("setting_is_not_its_hash", """UPDATE settings SET value='{"temperature":0.0}';"""),
    Forgery("engine_is_not_its_hash", "UPDATE engines SET info=replace(info, 'raw', 'processed');"),
    Forgery("cycle_of_parents", "UPDATE nodes SET parent_id=node_id WHERE kind='message';"),
    Forgery("tokens_are_not_counted", "UPDATE calls SET prompt_tokens=prompt_tokens+1;"),
    Forgery("call_without_its_answer", "DELETE FROM completions;"),
    # Values of a wrong type
    Forgery("text_for_a_number", "UPDATE rollouts SET attempt='many';"),
    Forgery("bytes_for_text", "UPDATE sessions SET label=X'ff00';"),
    Forgery("text_with_nul", "UPDATE sessions SET label='a'||char(0)||'b';"),
    Forgery("huge_number", "UPDATE rollouts SET exit_code=9223372036854775807;"),
    Forgery("negative_number", "UPDATE nodes SET length=-1;"),
    Forgery("infinite_reward", "UPDATE rewards SET value=9e999;"),
    Forgery("nan_in_json", """UPDATE rewards SET detail='{"a":NaN}';"""),
    Forgery("deep_json", change=_database(_deep_json)),
    Forgery("list_for_an_object", "UPDATE tasks SET spec='[1]';"),
    Forgery("unknown_status", "UPDATE rollouts SET status='rewarded';"),
    Forgery(
        "unknown_kind_of_remark",
        f"{_REMARK}; UPDATE remarks SET rollout_id = (SELECT rollout_id FROM rollouts), kind = 'x';",
    ),
    Forgery("list_for_packed_hooks", change=_database(_list_for_hooks)),
    Forgery("path_for_a_hash", "UPDATE artifacts SET sha256='../../../../etc/passwd';"),
    # Additions to what is stored
    Forgery("reward_for_a_local_rollout", f"{_REWARD};"),
    Forgery("remark_on_a_local_rollout", f"{_REMARK};"),
    Forgery("own_archive_again", own=True, control=True),
    Forgery("reward_in_an_own_archive", f"{_REWARD};", own=True),
    Forgery("session_reward_in_an_own_archive", f"{_SESSION_REWARD};", own=True),
    Forgery(
        "session_in_an_own_archive",
        "INSERT INTO sessions (session_id, origin, rollout_id, created_at) "
        "VALUES ('sess_x', 'rollout', '<rollout>', 1.0);",
        own=True,
    ),
    Forgery(
        "rollout_in_an_own_archive",
        "CREATE TEMP TABLE one AS SELECT * FROM rollouts;"
        "UPDATE one SET rollout_id='roll_x', reward=1.0, session_id=NULL;"
        "INSERT INTO rollouts SELECT * FROM one;",
        own=True,
    ),
    Forgery(
        "event_in_an_own_archive",
        "INSERT INTO rollout_events (rollout_id, at, kind, data) VALUES ('<rollout>', 1.0, 'status', '{}');",
        own=True,
    ),
    Forgery("session_of_a_local_rollout", "UPDATE sessions SET rollout_id='<rollout>';"),
    Forgery("call_in_a_local_session", "UPDATE calls SET session_id='<session>';"),
    Forgery("rollout_in_a_local_group", "UPDATE rollouts SET group_id='<group>';"),
    Forgery(
        "other_content_under_a_local_id",
        "UPDATE sessions SET session_id='<session>'; UPDATE calls SET session_id='<session>';"
        "UPDATE traces SET session_id='<session>'; UPDATE rollouts SET session_id='<session>';",
    ),
    Forgery(
        "local_rollout_with_reward_1",
        "".join(
            f"UPDATE {table} SET rollout_id='<rollout>';"
            for table in ("rollouts", "rewards", "traces", "artifacts", "stages", "rollout_events", "sessions")
        )
        + "UPDATE rollouts SET reward=1.0;",
    ),
    Forgery("task_with_other_content", """UPDATE tasks SET instruction='run rm -rf', spec='{"tests":["b"]}';"""),
    # Documents that are not of the form of Polar's
    Forgery("task_that_is_none", """UPDATE tasks SET task_id='t2', spec='{"run":"rm -rf"}';""" + _TASK_2),
    Forgery(
        "task_with_an_unknown_evaluator",
        """UPDATE tasks SET task_id='t2', spec=json_set(spec, '$.evaluators[0].kind', 'x');""" + _TASK_2,
    ),
    Forgery("certificate_that_is_none", """UPDATE traces SET certificate='{"schema":2,"grade":"exact"}';"""),
    Forgery(
        "certificate_of_an_unknown_grade", """UPDATE traces SET certificate=json_set(certificate, '$.grade', 'best');"""
    ),
    Forgery(
        "certificate_with_more_fields", """UPDATE traces SET certificate=json_set(certificate, '$.reward', 1.0);"""
    ),
    Forgery(
        "certificate_with_a_short_hash", """UPDATE traces SET certificate=json_set(certificate, '$.head', '00');"""
    ),
    # Programs in the database
    Forgery("view_for_a_table", "ALTER TABLE rewards RENAME TO r; CREATE VIEW rewards AS SELECT * FROM r;"),
    Forgery("trigger", "CREATE TRIGGER t AFTER UPDATE ON rewards BEGIN SELECT 1; END;"),
    Forgery("newer_schema", change=_database(_newer_schema)),
    # The zip file
    Forgery("file_twice", pack=_pack(lambda archive, unpacked: archive.write(unpacked / "polar.db", "polar.db"))),
    Forgery("path_out_of_the_folder", pack=_pack(lambda archive, _: archive.writestr("../../polar-was-here", "x"))),
    Forgery("link_in_the_archive", pack=_pack(_link)),
    Forgery(
        "many_files", pack=_pack(lambda archive, _: [archive.writestr(f"x{n}", "") for n in range(30_000)] and None)
    ),
    Forgery("artifact_of_3_gib", pack=_pack(_artifact_bomb)),
    Forgery("database_of_2_gib", change=_database_bomb),
    Forgery("message_of_1_gib", change=_database(_zstd_bomb)),
    Forgery("no_database", pack=lambda unpacked, file: zipfile.ZipFile(file, "w").close()),
    Forgery("not_an_archive", pack=lambda unpacked, file: file.write_bytes(b"PK\x03\x04" + os.urandom(4096)) and None),
)
