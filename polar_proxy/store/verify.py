"""Is everything that is stored still what was stored? Every hash is computed again, every cell unpacked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from sqlalchemy import Text, and_, case, cast, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.artifacts import artifact_path
from polar_proxy.store.chains import NodeKind, content_hash, node_id
from polar_proxy.store.database import Database
from polar_proxy.store.loader import CallLoader, fetch, fetch_links

ProgressCallback = Callable[[str, int, int], None]
"""Called with what is looked at, how much is done and how much there is."""

_PAGE = 500


@dataclass(frozen=True, slots=True)
class IntegrityFault:
    """`what` names the row (table and key), `problem` says what is wrong with it."""

    what: str
    problem: str


def no_progress(what: str, done: int, total: int) -> None:
    """Says nothing."""


class StoreVerifier:
    """Checks every row of one database."""

    def __init__(self, database: Database, artifacts: Path) -> None:
        self._database = database
        self._artifacts = artifacts

    async def verify(self, progress: ProgressCallback = no_progress) -> list[IntegrityFault]:
        """All faults found; none: every row is what it says. Reads only, and may run beside writers: what is removed
        while it looks can show as missing.

        Checked are the hashes of chains, settings and engines; that calls, traces and sessions refer to what is there
        and count it rightly; that every packed cell unpacks; and the artifacts on disk."""
        faults: list[IntegrityFault] = []
        async with self._database.reading() as connection:
            if self._database.dialect == "sqlite":
                faults += await _of_sqlite(connection)
            faults += await _of_hashed(connection)
            faults += await _of_counters(connection)
            faults += await _of_traces(connection)
        seen: set[bytes] = set()
        faults += await self._of_sessions(seen, progress)
        faults += await self._of_other_nodes(seen, progress)
        faults += await self._of_artifacts(progress)
        return faults

    async def _of_sessions(self, seen: set[bytes], progress: ProgressCallback) -> list[IntegrityFault]:
        faults: list[IntegrityFault] = []
        c = schema.calls.c
        async with self._database.reading() as connection:
            query = select(c.session_id, func.count()).group_by(c.session_id).order_by(c.session_id)
            counts = (await connection.execute(query)).all()
        total, done = sum(count for _, count in counts), 0
        for session_id, count in counts:
            async with self._database.reading() as connection:
                found = await fetch(connection, c.session_id == session_id)
            faults += await asyncio.to_thread(lambda: list(_ChainVerifier.of(found).calls(seen)))  # noqa: B023 (awaited here)
            done += count
            progress("calls", done, total)
        return faults

    async def _of_other_nodes(self, seen: set[bytes], progress: ProgressCallback) -> list[IntegrityFault]:
        """Nodes that no call leads to: rescored prompts, and what `polar db vacuum` would remove."""
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
                    audit = _ChainVerifier((), (), await fetch_links(connection, heads))
                    faults += await asyncio.to_thread(lambda: list(audit.heads(new, seen)))  # noqa: B023
                progress("nodes", done, total)

    async def _of_artifacts(self, progress: ProgressCallback) -> list[IntegrityFault]:
        a = schema.artifacts.c
        async with self._database.reading() as connection:
            rows = (await connection.execute(select(a.artifact_id, a.sha256, a.bytes).order_by(a.artifact_id))).all()
        faults: list[IntegrityFault] = []
        for done, row in enumerate(rows, 1):
            place = artifact_path(self._artifacts, row.sha256)
            try:
                content = await asyncio.to_thread(place.read_bytes)
            except OSError as error:
                faults.append(
                    IntegrityFault(f"artifacts {row.artifact_id}", f"its file {place} cannot be read: {error.strerror}")
                )
            else:
                if len(content) != row.bytes or hashlib.sha256(content).hexdigest() != row.sha256:
                    faults.append(IntegrityFault(f"artifacts {row.artifact_id}", f"the content of {place} is another"))
            progress("artifacts", done, len(rows))
        return faults


class _ChainVerifier(CallLoader):
    """The rows behind some calls, looked at one by one."""

    @classmethod
    def of(cls, found: CallLoader) -> Self:
        audit = cls((), (), ())
        audit.__dict__.update(found.__dict__)
        return audit

    def calls(self, seen: set[bytes]) -> Iterator[IntegrityFault]:
        chosen: dict[str, list[Any]] = {}
        for row in self._chosen:
            chosen.setdefault(row.call_id, []).append(row)
        for row in self._rows:
            name = f"calls {row.call_id}"
            own = chosen.get(row.call_id, [])
            try:
                (record,) = self._records([(row, own)])
            except (StoreError, ValueError, KeyError, TypeError) as error:
                yield IntegrityFault(name, str(error) or type(error).__name__)
                continue
            size = None if record.prompt_ids is None else int(record.prompt_ids.size)
            if size != row.prompt_tokens:
                yield IntegrityFault(name, f"it counts {row.prompt_tokens} prompt tokens and has {size}")
            sizes = [int(choice.token_ids.size) for choice in record.choices]
            if sum(sizes) != row.completion_tokens:
                yield IntegrityFault(name, f"it counts {row.completion_tokens} sampled tokens and has {sum(sizes)}")
            for choice, answer in zip(record.choices, own, strict=True):
                if not choice.token_ids.size == choice.logprobs.size == answer.tokens:
                    yield IntegrityFault(
                        f"completions {row.call_id} {choice.index}",
                        f"it counts {answer.tokens} tokens, has {choice.token_ids.size} and {choice.logprobs.size} "
                        "log-probabilities",
                    )
            heads: list[tuple[bytes | None, NodeKind]] = [
                *((row.messages_node, "message"), (row.tools_node, "tools"), (row.prompt_node, "tokens"))
            ]
            yield from self.heads([(bytes(head), kind) for head, kind in heads if head is not None], seen)

    def heads(self, heads: Sequence[tuple[bytes, NodeKind]], seen: set[bytes]) -> Iterator[IntegrityFault]:
        """Hash again the chains that end here, up to where they were seen before."""
        for head, kind in heads:
            above: bytes | None = head
            chain: list[bytes] = []
            try:
                while above is not None and above not in seen:
                    chain.append(above)
                    above = self._link(above).parent_id
                if chain:
                    self._unpack(head, kind)
            except StoreError as error:
                yield IntegrityFault(f"nodes {head.hex()}", str(error))
                continue
            for key in reversed(chain):
                seen.add(key)
                if problem := self._problem(key, kind):
                    yield IntegrityFault(f"nodes {key.hex()}", problem)

    def _unpack(self, head: bytes, kind: NodeKind) -> None:
        if kind == "tokens":
            self.prompt(head)
            return
        chain: list[bytes] = []
        above: bytes | None = head
        while above is not None:
            chain.append(above)
            above = self._link(above).parent_id
        self._messages(head, len(chain))

    def _problem(self, key: bytes, kind: NodeKind) -> str | None:
        link = self._link(key)
        if kind == "tokens":
            above = 0 if link.parent_id is None else self._link(link.parent_id).total
            ids = self.prompt(key)[above:]
            content, length = np.ascontiguousarray(ids, dtype="<i4").tobytes(), int(ids.size)
        else:
            content = self._bytes[key]
            length = len(content)
        if node_id(link.parent_id, kind, content) != key:
            return "its content or its parent is not what its id says"
        before = 0 if link.parent_id is None else self._link(link.parent_id).total
        if (link.length, link.total) != (length, before + length):
            return f"it counts {link.length} of {link.total}, has {length} of {before + length}"
        return None


async def _of_sqlite(connection: AsyncConnection) -> list[IntegrityFault]:
    faults: list[IntegrityFault] = []
    for line in await connection.scalars(text("PRAGMA quick_check")):
        if line != "ok":
            faults.append(IntegrityFault("database", str(line)))
    for row in (await connection.execute(text("PRAGMA foreign_key_check"))).mappings():
        name = f"{row['table']} (row {row['rowid']})"
        faults.append(IntegrityFault(name, f"it refers to a row of {row['parent']} that is not there"))
    return faults


async def _of_hashed(connection: AsyncConnection) -> list[IntegrityFault]:
    faults: list[IntegrityFault] = []
    for name, key, value in (
        ("settings", schema.settings.c.settings_hash, schema.settings.c.value),
        ("engines", schema.engines.c.engine_hash, schema.engines.c.info),
    ):
        # The text as it stands: read and printed again, a number could look another way.
        for row in await connection.execute(select(key, cast(value, Text))):
            if content_hash(row[1].encode()) != row[0]:
                faults.append(IntegrityFault(f"{name} {row[0].hex()}", "its content is not what its id says"))
    return faults


async def _of_counters(connection: AsyncConnection) -> list[IntegrityFault]:
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
        for name, said, found in zip(names, numbers[:4], numbers[4:], strict=True):
            if said != found:
                faults.append(
                    IntegrityFault(f"sessions {session_id}", f"its counter {name} says {said}, its calls {found}")
                )
    return faults


async def _of_traces(connection: AsyncConnection) -> list[IntegrityFault]:
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
