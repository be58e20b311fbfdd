"""The integrity check of a database: every hash is computed again and every cell unpacked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Text, and_, case, cast, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.artifacts import artifact_path
from polar_proxy.store.database import Database
from polar_proxy.store.encoding.chains import NodeKind, content_hash, node_id
from polar_proxy.store.encoding.loader import CallLoader, fetch, fetch_nodes

ProgressCallback = Callable[[str, int, int], None]
"""Called with (kind of row, number done, total number)."""

_PAGE = 500


@dataclass(frozen=True, slots=True)
class IntegrityFault:
    """A damaged row. `what`: its table and key. `problem`: what is wrong."""

    what: str
    problem: str


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


class StoreVerifier:
    """Checks every row of one database.

    It checks the hashes of chains, settings and engines; the references and counts of calls, traces and sessions; that
    every packed cell can be unpacked; and the artifacts on disk. Reads only. Rows that another process deletes during
    the check can be reported as missing.
    """

    def __init__(self, database: Database, artifacts: Path) -> None:
        self._database = database
        self._artifacts = artifacts

    async def verify(self, progress: ProgressCallback = no_progress) -> list[IntegrityFault]:
        """Return all faults."""
        faults: list[IntegrityFault] = []
        async with self._database.reading() as connection:
            if self._database.dialect == "sqlite":
                faults += await _check_sqlite(connection)
            faults += await _check_hashes(connection)
            faults += await _check_counters(connection)
            faults += await _check_traces(connection)
        seen: set[bytes] = set()
        faults += await self._check_sessions(seen, progress)
        faults += await self._check_other_nodes(seen, progress)
        faults += await self._check_artifacts(progress)
        return faults

    async def _check_sessions(self, seen: set[bytes], progress: ProgressCallback) -> list[IntegrityFault]:
        faults: list[IntegrityFault] = []
        c = schema.calls.c
        async with self._database.reading() as connection:
            query = select(c.session_id, func.count()).group_by(c.session_id).order_by(c.session_id)
            counts = (await connection.execute(query)).all()
        total, done = sum(count for _, count in counts), 0
        for session_id, count in counts:
            async with self._database.reading() as connection:
                verifier = _CallVerifier(await fetch(connection, c.session_id == session_id))
            faults += await asyncio.to_thread(lambda: list(verifier.check_calls(seen)))  # noqa: B023 (awaited here)
            done += count
            progress("calls", done, total)
        return faults

    async def _check_other_nodes(self, seen: set[bytes], progress: ProgressCallback) -> list[IntegrityFault]:
        """Check the nodes that belong to no call: those of rescored prompts, and those that `polar db vacuum` would
        remove."""
        faults: list[IntegrityFault] = []
        n = schema.nodes.c
        last, done = b"", 0
        async with self._database.reading() as connection:
            total = int(await connection.scalar(select(func.count()).select_from(schema.nodes)) or 0)
            while True:
                query = select(n.node_id, n.kind).where(n.node_id > last).order_by(n.node_id).limit(_PAGE)
                page = [(bytes(row.node_id), row.kind) for row in await connection.execute(query)]
                if not page:
                    return faults
                last, done = page[-1][0], done + len(page)
                if new := [row for row in page if row[0] not in seen]:
                    heads = select(n.node_id).where(n.node_id.in_([key for key, _ in new]))
                    verifier = _CallVerifier(CallLoader(await fetch_nodes(connection, heads)))
                    faults += await asyncio.to_thread(lambda: list(verifier.check_chains(new, seen)))  # noqa: B023
                progress("nodes", done, total)

    async def _check_artifacts(self, progress: ProgressCallback) -> list[IntegrityFault]:
        a = schema.artifacts.c
        async with self._database.reading() as connection:
            rows = (await connection.execute(select(a.artifact_id, a.sha256, a.bytes).order_by(a.artifact_id))).all()
        faults: list[IntegrityFault] = []
        for done, row in enumerate(rows, 1):
            what, path = f"artifacts {row.artifact_id}", artifact_path(self._artifacts, row.sha256)
            try:
                content = await asyncio.to_thread(path.read_bytes)
            except OSError as error:
                faults.append(IntegrityFault(what, f"its file {path} cannot be read: {error.strerror}"))
            else:
                if len(content) != row.bytes or hashlib.sha256(content).hexdigest() != row.sha256:
                    faults.append(IntegrityFault(what, f"the content of {path} has changed"))
            progress("artifacts", done, len(rows))
        return faults


class _CallVerifier:
    """Unpacks the rows of some calls one by one and compares them with their counts and hashes."""

    def __init__(self, loader: CallLoader) -> None:
        self._loader = loader

    def check_calls(self, seen: set[bytes]) -> Iterator[IntegrityFault]:
        for row, answers in self._loader.rows():
            what = f"calls {row.call_id}"
            try:
                record = self._loader.record(row)
            except (StoreError, ValueError, KeyError, TypeError) as error:
                yield IntegrityFault(what, str(error) or type(error).__name__)
                continue
            size = None if record.prompt_ids is None else int(record.prompt_ids.size)
            if size != row.prompt_tokens:
                yield IntegrityFault(what, f"it counts {row.prompt_tokens} prompt tokens and has {size}")
            sizes = [int(choice.token_ids.size) for choice in record.choices]
            if sum(sizes) != row.completion_tokens:
                yield IntegrityFault(what, f"it counts {row.completion_tokens} sampled tokens and has {sum(sizes)}")
            for choice, answer in zip(record.choices, answers, strict=True):
                if not choice.token_ids.size == choice.logprobs.size == answer.tokens:
                    yield IntegrityFault(
                        f"completions {row.call_id} {choice.index}",
                        f"it counts {answer.tokens} tokens, has {choice.token_ids.size} and {choice.logprobs.size} "
                        "log-probabilities",
                    )
            heads: list[tuple[bytes | None, NodeKind]] = [
                *((row.messages_node, "message"), (row.tools_node, "tools"), (row.prompt_node, "tokens"))
            ]
            yield from self.check_chains([(bytes(head), kind) for head, kind in heads if head is not None], seen)

    def check_chains(self, heads: Sequence[tuple[bytes, NodeKind]], seen: set[bytes]) -> Iterator[IntegrityFault]:
        """Hash the chains that end at these nodes again, except for the nodes in `seen`, and add them to `seen`."""
        for head, kind in heads:
            try:
                new = self._loader.chain(head, seen)
                contents = [self._loader.content(node, kind) for node in new]
            except StoreError as error:
                yield IntegrityFault(f"nodes {head.hex()}", str(error))
                continue
            seen.update(new)
            for node, content in zip(new, contents, strict=True):
                if problem := self._problem(node, kind, content):
                    yield IntegrityFault(f"nodes {node.hex()}", problem)

    def _problem(self, node: bytes, kind: NodeKind, content: bytes) -> str | None:
        row = self._loader.node(node)
        if node_id(row.parent_id, kind, content) != node:
            return "its content or its parent does not match its id"
        length = len(content) // 4 if kind == "tokens" else len(content)
        before = 0 if row.parent_id is None else self._loader.node(row.parent_id).chain_length
        if (row.length, row.chain_length) != (length, before + length):
            return f"it counts {row.length} of {row.chain_length}, has {length} of {before + length}"
        return None


async def _check_sqlite(connection: AsyncConnection) -> list[IntegrityFault]:
    lines = await connection.scalars(text("PRAGMA quick_check"))
    faults = [IntegrityFault("database", str(line)) for line in lines if line != "ok"]
    for row in (await connection.execute(text("PRAGMA foreign_key_check"))).mappings():
        what = f"{row['table']} (row {row['rowid']})"
        faults.append(IntegrityFault(what, f"it refers to a row of {row['parent']} that does not exist"))
    return faults


async def _check_hashes(connection: AsyncConnection) -> list[IntegrityFault]:
    faults: list[IntegrityFault] = []
    for name, key, value in (
        ("settings", schema.settings.c.settings_hash, schema.settings.c.value),
        ("engines", schema.engines.c.engine_hash, schema.engines.c.info),
    ):
        # The text as stored, because parsing and printing it could change a number.
        for row in await connection.execute(select(key, cast(value, Text))):
            if content_hash(row[1].encode()) != row[0]:
                faults.append(IntegrityFault(f"{name} {row[0].hex()}", "its content does not match its id"))
    return faults


async def _check_counters(connection: AsyncConnection) -> list[IntegrityFault]:
    s, c = schema.sessions.c, schema.calls.c
    counted = (
        select(
            c.session_id,
            func.count().label("calls"),
            func.sum(case((c.status != "ok", 1), else_=0)).label("failed_calls"),
            func.sum(func.coalesce(c.prompt_tokens, 0)).label("prompt_tokens"),
            func.sum(c.completion_tokens).label("completion_tokens"),
        )
        .group_by(c.session_id)
        .subquery()
    )
    names = ("calls", "failed_calls", "prompt_tokens", "completion_tokens")
    real = [func.coalesce(counted.c[name], 0) for name in names]
    query = (
        select(s.session_id, *(s[name] for name in names), *real)
        .outerjoin(counted, counted.c.session_id == s.session_id)
        .where(or_(*(s[name] != value for name, value in zip(names, real, strict=True))))
        .order_by(s.session_id)
    )
    faults: list[IntegrityFault] = []
    for session_id, *numbers in await connection.execute(query):
        for name, stored, found in zip(names, numbers[:4], numbers[4:], strict=True):
            if stored != found:
                problem = f"its counter {name} is {stored}, its calls have {found}"
                faults.append(IntegrityFault(f"sessions {session_id}", problem))
    return faults


async def _check_traces(connection: AsyncConnection) -> list[IntegrityFault]:
    t, p = schema.traces.c, schema.trace_spans.c
    size = p.end_token - p.start_token
    length = func.coalesce(func.sum(size), 0)
    trained = func.coalesce(func.sum(case((p.kind == "sampled", size), else_=0)), 0)
    query = (
        select(t.trace_id, t.length, t.trained_tokens, length, trained)
        .outerjoin(schema.trace_spans, and_(p.trace_id == t.trace_id))
        .group_by(t.trace_id, t.length, t.trained_tokens)
        .having(or_(t.length != length, t.trained_tokens != trained))
        .order_by(t.trace_id)
    )
    return [
        IntegrityFault(
            f"traces {row[0]}", f"it counts {row[2]} trained of {row[1]} tokens, its spans {row[4]} of {row[3]}"
        )
        for row in await connection.execute(query)
    ]
