"""The integrity check of a database: every hash is computed again and every cell unpacked."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Text, case, cast, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.database import Database
from polar_proxy.store.encoding.chains import NodeKind, content_hash, node_id
from polar_proxy.store.encoding.loader import OF_SESSION, CallLoader, fetch, fetch_nodes
from polar_proxy.store.repositories.artifacts import artifact_path
from polar_proxy.types import FAILED

ProgressCallback = Callable[[str, int, int], None]
"""Called with (kind of row, number done, total number)."""

_PAGE = 500
_PRICE_TOLERANCE = 1e-6
"""US dollars by which a session's price may differ from the sum of its calls' prices, because floating-point sums
depend on the order.
"""


@dataclass(frozen=True, slots=True)
class IntegrityFault:
    """A damaged row. `what`: its table and key. `problem`: what is wrong."""

    what: str
    problem: str


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


Faults = AsyncIterator[IntegrityFault]


async def verify(database: Database, artifacts: Path, progress: ProgressCallback = no_progress) -> list[IntegrityFault]:
    """Check every row of a database and return all faults.

    The check covers the hashes of chains, settings and engines, the references and counts of calls, traces and
    sessions, the packed cells (each one is unpacked), and the artifacts on disk. Nothing is written. All rows are read
    from one snapshot, so that rows which another process writes or deletes meanwhile do not count as faults. But if
    another process prunes an artifact meanwhile, the missing file counts as a fault.
    """
    seen: set[bytes] = set()
    async with database.reading() as connection:
        if database.dialect == "postgresql":
            await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        checks = (
            *((_check_sqlite(connection),) if database.dialect == "sqlite" else ()),
            *(_check_hashes(connection), _check_counters(connection), _check_traces(connection)),
            _check_calls(connection, seen, progress),
            _check_other_nodes(connection, seen, progress),
            _check_artifacts(connection, artifacts, progress),
        )
        return [fault for check in checks async for fault in check]


async def _check_calls(connection: AsyncConnection, seen: set[bytes], progress: ProgressCallback) -> Faults:
    c = schema.calls.c
    query = select(c.session_id, func.count()).group_by(c.session_id).order_by(c.session_id)
    counts = (await connection.execute(query)).all()
    total, done = sum(count for _, count in counts), 0
    for session_id, count in counts:
        verifier = _CallVerifier(await connection.run_sync(fetch, OF_SESSION, {"session": session_id}))
        for fault in await asyncio.to_thread(lambda: list(verifier.check_calls(seen))):  # noqa: B023 (awaited here)
            yield fault
        done += count
        progress("calls", done, total)


async def _check_other_nodes(connection: AsyncConnection, seen: set[bytes], progress: ProgressCallback) -> Faults:
    """Check the nodes that belong to no call: nodes of rescores, and unused nodes that no vacuum has removed yet."""
    n = schema.nodes.c
    last, done = b"", 0
    total = await connection.scalar(select(func.count()).select_from(schema.nodes)) or 0
    while True:
        query = select(n.node_id, n.kind).where(n.node_id > last).order_by(n.node_id).limit(_PAGE)
        page = [(bytes(row.node_id), row.kind) for row in await connection.execute(query)]
        if not page:
            return
        last, done = page[-1][0], done + len(page)
        if new := [row for row in page if row[0] not in seen]:
            heads = select(n.node_id).where(n.node_id.in_([key for key, _ in new]))
            verifier = _CallVerifier(CallLoader(await connection.run_sync(fetch_nodes, heads)))
            for fault in await asyncio.to_thread(lambda: list(verifier.check_chains(new, seen))):  # noqa: B023
                yield fault
        progress("nodes", done, total)


async def _check_artifacts(connection: AsyncConnection, folder: Path, progress: ProgressCallback) -> Faults:
    a = schema.artifacts.c
    rows = (await connection.execute(select(a.artifact_id, a.sha256, a.bytes).order_by(a.artifact_id))).all()
    for done, row in enumerate(rows, 1):
        what, path = f"artifacts {row.artifact_id}", artifact_path(folder, row.sha256)
        try:
            content = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            yield IntegrityFault(what, f"its file {path} cannot be read: {error.strerror}")
        else:
            if len(content) != row.bytes or hashlib.sha256(content).hexdigest() != row.sha256:
                yield IntegrityFault(what, f"the content of {path} has changed")
        progress("artifacts", done, len(rows))


class _CallVerifier:
    """Unpacks the rows and nodes of some calls, and checks whether they match the stored counts and hashes."""

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
                yield IntegrityFault(what, f"its row counts {row.prompt_tokens} prompt tokens, not {size}")
            sizes = [int(choice.token_ids.size) for choice in record.choices]
            if sum(sizes) != row.completion_tokens:
                yield IntegrityFault(what, f"its row counts {row.completion_tokens} sampled tokens, not {sum(sizes)}")
            for choice, answer in zip(record.choices, answers, strict=True):
                if not choice.token_ids.size == choice.logprobs.size == answer.tokens:
                    yield IntegrityFault(
                        f"completions {row.call_id} {choice.index}",
                        f"its row counts {answer.tokens} tokens, stored are {choice.token_ids.size} tokens and "
                        f"{choice.logprobs.size} log-probabilities",
                    )
            heads: list[tuple[bytes | None, NodeKind]]
            heads = [(row.messages_node, "message"), (row.tools_node, "tools"), (row.prompt_node, "tokens")]
            yield from self.check_chains([(bytes(head), kind) for head, kind in heads if head is not None], seen)

    def check_chains(self, heads: Sequence[tuple[bytes, NodeKind]], seen: set[bytes]) -> Iterator[IntegrityFault]:
        """Yield a fault for each node of these chains whose id or lengths do not match its content.

        `heads`: the last node of each chain. `seen`: nodes that were checked before and are not checked again. The
        nodes that this call checks are added to `seen`.
        """
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
            return (
                f"its row states length {row.length} and chain length {row.chain_length}, "
                f"but found are {length} and {before + length}"
            )
        return None


async def _check_sqlite(connection: AsyncConnection) -> Faults:
    for line in await connection.scalars(text("PRAGMA quick_check")):
        if line != "ok":
            yield IntegrityFault("database", str(line))
    for row in (await connection.execute(text("PRAGMA foreign_key_check"))).mappings():
        what = f"{row['table']} (row {row['rowid']})"
        yield IntegrityFault(what, f"it refers to a row of {row['parent']} that does not exist")


async def _check_hashes(connection: AsyncConnection) -> Faults:
    for table, value in ((schema.settings, schema.settings.c.value), (schema.engines, schema.engines.c.info)):
        # The text as stored, because parsing and printing it could change a number.
        for row in await connection.execute(select(*table.primary_key.columns, cast(value, Text))):
            if content_hash(row[1].encode()) != row[0]:
                yield IntegrityFault(f"{table.name} {row[0].hex()}", "its content does not match its id")


async def _check_counters(connection: AsyncConnection) -> Faults:
    s, c = schema.sessions.c, schema.calls.c
    counts = {
        s.calls: func.count(c.call_id),
        s.failed_calls: func.coalesce(func.sum(case((c.status.in_(FAILED), 1), else_=0)), 0),
        s.prompt_tokens: func.coalesce(func.sum(func.coalesce(c.input_tokens, c.prompt_tokens)), 0),
        s.completion_tokens: func.coalesce(func.sum(func.coalesce(c.output_tokens, c.completion_tokens)), 0),
    }
    query = (
        select(s.session_id, *counts, *counts.values())
        .outerjoin(schema.calls, c.session_id == s.session_id)
        .group_by(s.session_id)
        .having(or_(*(counter != count for counter, count in counts.items())))
        .order_by(s.session_id)
    )
    for session_id, *numbers in await connection.execute(query):
        for counter, stored, found in zip(counts, numbers[:4], numbers[4:], strict=True):
            if stored != found:
                problem = f"its counter {counter.name} is {stored}, its calls have {found}"
                yield IntegrityFault(f"sessions {session_id}", problem)
    price = func.sum(c.price_usd)
    differs = func.abs(func.coalesce(s.price_usd, 0.0) - func.coalesce(price, 0.0)) > _PRICE_TOLERANCE
    prices = (
        select(s.session_id, s.price_usd, price)
        .outerjoin(schema.calls, c.session_id == s.session_id)
        .group_by(s.session_id)
        .having(differs)
    )
    for session_id, stored, found in await connection.execute(prices):
        yield IntegrityFault(f"sessions {session_id}", f"its price is {stored}, its calls cost {found}")


async def _check_traces(connection: AsyncConnection) -> Faults:
    t, p = schema.traces.c, schema.trace_spans.c
    size = p.end_token - p.start_token
    length = func.coalesce(func.sum(size), 0)
    trained = func.coalesce(func.sum(case((p.kind == "sampled", size), else_=0)), 0)
    query = (
        select(t.trace_id, t.length, t.trained_tokens, length, trained)
        .outerjoin(schema.trace_spans, p.trace_id == t.trace_id)
        .group_by(t.trace_id)
        .having(or_(t.length != length, t.trained_tokens != trained))
        .order_by(t.trace_id)
    )
    for row in await connection.execute(query):
        problem = f"its row counts {row[1]} tokens ({row[2]} trained), its spans have {row[3]} ({row[4]} trained)"
        yield IntegrityFault(f"traces {row[0]}", problem)
