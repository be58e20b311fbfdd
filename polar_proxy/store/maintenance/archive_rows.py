"""Copies the rows of a received database, which may come from anyone, into a new database with this version's schema.

The received file is read as data only: it must have plain tables with exactly the columns of the schema. So no view,
trigger, generated column or virtual table in the file is ever evaluated. Each value must have the type of its column.
The total size of the compressed values after unpacking is limited. It is checked before anything is unpacked, because
the headers of the values state the sizes.
"""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import orjson
from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, Integer, LargeBinary, Table

from polar_proxy.errors import StoreError, UsageError
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.store import json_codec, schema
from polar_proxy.store.encoding import cells
from polar_proxy.store.encoding.loader import engine_info
from polar_proxy.store.encoding.packed_json import MAX_DEFLATE_LENGTH, unpack_small_json
from polar_proxy.store.maintenance.verify import ProgressCallback
from polar_proxy.store.repositories.remarks import REMARK_KINDS
from polar_proxy.types import CallStatus, Edge, LogprobMode, PromptMode, SpanKind

_MAX_VALUE = 512 << 20
"""Maximum size of one value in bytes. Any request body that the gateway accepts by default is smaller."""
_MAX_ROWS = 100_000_000
_LATEST = 1e11
"""Largest time in seconds since the epoch (the year 5138)."""
_LARGEST_INTEGER = 2**31 - 1
_WORDS: Mapping[tuple[str, str], frozenset[str]] = {
    ("rollouts", "status"): schema.ROLLOUT_STATUSES,
    ("groups", "status"): frozenset({"open", "finished", "cancelled"}),
    ("sessions", "origin"): frozenset({"key", "open", "rollout", "user"}),
    ("remarks", "kind"): frozenset(REMARK_KINDS),
    ("nodes", "kind"): frozenset({"message", "tools", "tokens"}),
    ("trace_spans", "kind"): frozenset(get_args(SpanKind)),
    ("calls", "edge"): frozenset(get_args(Edge)),
    ("calls", "status"): frozenset(get_args(CallStatus)),
    ("calls", "logprob_mode"): frozenset(get_args(LogprobMode)),
    ("calls", "prompt_mode"): frozenset(get_args(PromptMode)),
}
_JSON_FORMS: Mapping[tuple[str, str], type] = {("traces", "call_ids"): list, ("completions", "versions"): list}
"""The Python types of the JSON columns whose values are not JSON objects."""
ColumnChecks = Mapping[tuple[str, str], Callable[[Any], None]]
"""Functions by (table, column). Each raises ValueError for a JSON value that does not fit the column's model."""
_CANONICAL = frozenset({"settings", "engines"})
"""Tables whose key is the hash of the row's JSON text."""


class ForgedRowError(StoreError):
    """A row of an archive has content that Polar does not write, so it cannot be imported."""


def copy_rows(
    received: Path,
    own: Path,
    tables: list[Table],
    unpacked_limit: int,
    progress: ProgressCallback,
    models: ColumnChecks,
) -> None:
    """Copy all rows of `tables` from the file `received` into the new database `own`.

    Raises StoreError if the file is damaged, is too large, or has content that Polar does not write.
    `unpacked_limit`: maximum total size in bytes to which the file's compressed values may unpack."""
    unpacked = UnpackedBytes(unpacked_limit)
    with closing(_open(received)) as source, closing(sqlite3.connect(own)) as target:
        source.execute("PRAGMA trusted_schema=OFF")
        source.execute("PRAGMA cell_size_check=ON")
        source.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE)
        try:
            _check_schema(source, tables)
            counts = [source.execute(f"SELECT COUNT(*) FROM {table.name}").fetchone()[0] for table in tables]
            if sum(counts) > _MAX_ROWS:
                raise ForgedRowError(
                    f"The archive has {sum(counts)} rows, more than the {_MAX_ROWS} that can be imported"
                )
            for table, count in zip(tables, counts, strict=True):
                _copy_table(source, target, table, count, unpacked, progress, models)
            _check_references(target)
            _check_chains(target)
            _check_sizes(target, unpacked_limit)
            target.commit()
        except sqlite3.Error as error:
            raise ForgedRowError(f"The database in the archive is damaged: {error}") from error


def refuse_programs(received: Path) -> None:
    """Raise StoreError for a database with triggers or virtual tables: an upgrade of the database would run them."""
    programs = "SELECT name FROM sqlite_master WHERE type = 'trigger' OR sql LIKE 'CREATE VIRTUAL%'"
    try:
        with closing(_open(received)) as source:
            if found := source.execute(programs).fetchone():
                raise ForgedRowError(
                    f"The database in the archive is forged: it contains a trigger or virtual table, {found[0]!r:.80}"
                )
    except sqlite3.Error as error:
        raise ForgedRowError(f"The database in the archive is damaged: {error}") from error


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)


def _check_schema(source: sqlite3.Connection, tables: list[Table]) -> None:
    kinds = dict(source.execute("SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view')"))
    for table in tables:
        columns = source.execute(f"PRAGMA table_xinfo({table.name})").fetchall()
        names = [name for _, name, *_, hidden in columns if not hidden]
        plain = len(names) == len(columns) and kinds.get(table.name) == "table"
        virtual = source.execute(
            "SELECT 1 FROM sqlite_master WHERE name = ? AND (sql LIKE 'CREATE VIRTUAL%' OR rootpage = 0)", (table.name,)
        ).fetchone()
        if not plain or virtual or set(names) != {column.name for column in table.columns}:
            raise ForgedRowError(
                f"The database in the archive is damaged: {table.name} is not a plain table with the columns of "
                "Polar's schema"
            )


def _copy_table(
    source: sqlite3.Connection,
    target: sqlite3.Connection,
    table: Table,
    count: int,
    unpacked: UnpackedBytes,
    progress: ProgressCallback,
    models: ColumnChecks,
) -> None:
    names = [column.name for column in table.columns]
    checks = [_check_of(table, column, models.get((table.name, column.name))) for column in table.columns]
    done = itertools.count(1)

    def rows() -> Iterator[tuple[Any, ...]]:
        for row in source.execute(f"SELECT {', '.join(names)} FROM {table.name}"):
            for name, check, value in zip(names, checks, row, strict=True):
                try:
                    check(value)
                except (ValueError, StoreError) as error:
                    raise ForgedRowError(
                        f"Nothing was imported: {table.name}.{name} of {row[0]!r:.80}: {error}"
                    ) from error
            unpacked.count(table.name, dict(zip(names, row, strict=True)))
            if (number := next(done)) % 1000 == 0 or number == count:
                progress(table.name, number, count)
            yield row

    marks = ", ".join("?" * len(names))
    target.executemany(f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({marks})", rows())


# ---------------------------------------------------------------- values


def _check_of(table: Table, column: Column[Any], model: Callable[[Any], None] | None) -> Callable[[Any], None]:
    """Return a function that raises ValueError or StoreError for a value that the column cannot have."""
    check = _check_of_type(table, column, model)

    def checked(value: Any) -> None:
        if value is not None:
            check(value)
        elif not column.nullable:
            raise ValueError("is missing")

    return checked


def _check_of_type(table: Table, column: Column[Any], model: Callable[[Any], None] | None) -> Callable[[Any], None]:
    kind = column.type
    if isinstance(kind, schema.PackedJson):
        return lambda value: _check_packed(_typed(value, bytes))
    if isinstance(kind, JSON):
        return lambda value: _check_json(table.name, column.name, _typed(value, str), model)
    if isinstance(kind, LargeBinary):
        is_key = bool(column.primary_key or column.foreign_keys)
        return lambda value: _check_bytes(_typed(value, bytes), is_key)
    if isinstance(kind, Boolean):
        return lambda value: _require(_typed(value, int) in (0, 1), "is neither true nor false")
    if isinstance(kind, Integer):  # BigInteger too
        largest = 2**63 - 1 if isinstance(kind, BigInteger) else _LARGEST_INTEGER
        least = -largest if column.name == "seed" else 0
        return lambda value: _require(least <= _typed(value, int) <= largest, "is out of range")
    if isinstance(kind, Double):
        is_time = column.name == "at" or column.name.endswith("_at")
        return lambda value: _check_number(value, is_time)
    words = _WORDS.get((table.name, column.name))
    return lambda value: _check_text(_typed(value, str), words)


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"has the type {type(value).__name__}, not {kind.__name__}")
    return value


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _check_bytes(value: bytes, is_key: bool) -> None:
    _require(not is_key or len(value) == 16, "is not a hash of 16 bytes")


def _check_number(value: Any, is_time: bool) -> None:
    number = float(value) if type(value) is int else _typed(value, float)
    _require(math.isfinite(number), "is not a finite number")
    _require(not is_time or 0 <= number <= _LATEST, "is not a time")


def _check_packed(value: bytes) -> None:
    _require(isinstance(_json(unpack_small_json(value).decode()), dict), "is not a packed JSON object")


def _check_text(value: str, words: frozenset[str] | None) -> None:
    _require("\0" not in value, "contains a NUL character")
    _require(words is None or value in words, f"is {value!r:.60}, which this column cannot have")


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # lone surrogates and large integers, which Polar writes too
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("is nested too deeply") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"contains {name}, which is not JSON")


def _check_json(table: str, column: str, text: str, model: Callable[[Any], None] | None) -> None:
    value = _json(text)
    form = _JSON_FORMS.get((table, column), dict)
    _require(isinstance(value, form), f"is not a JSON {'list' if form is list else 'object'}")
    if model is not None:
        model(value)
    if table in _CANONICAL:
        _require(json_codec.dumps_text(value) == text, "is not written as Polar writes JSON")
    try:
        if table == "engines":
            engine_info(value)
        elif (table, column) == ("rollouts", "config"):
            RolloutSpec.read(value)
        elif (table, column) == ("traces", "call_ids"):
            _require(all(isinstance(name, str) for name in value), "is not a list of ids")
    except (UsageError, TypeError, KeyError) as error:
        raise ValueError(f"is not JSON of the form that Polar writes into this column: {error}") from None


# ---------------------------------------------------------------- all rows


class UnpackedBytes:
    """An upper bound on the total size of an archive's values after unpacking, computed from their headers.

    Raises ForgedRowError if the total exceeds `limit`, or if the header and the row of a node state different lengths.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0

    def count(self, table: str, row: Mapping[str, Any]) -> None:
        if table == "nodes":
            is_tokens = row["kind"] == "tokens"
            size = cells.unpacked_size(row["data"])
            width = cells.width(row["data"]) if is_tokens else 1
            if size is not None and size != row["length"] * width:
                raise ForgedRowError(
                    f"Nothing was imported: the node {row['node_id'].hex()} has content of another length than its row "
                    "states"
                )
            self._add(row["length"] * (4 if is_tokens else 1))
        elif table in ("completions", "rescores"):
            for name in ("message", "provider_turn", "token_ids", "logprobs"):
                if row.get(name) is not None:
                    self._add(cells.unpacked_size(row[name]) or MAX_DEFLATE_LENGTH)

    def _add(self, size: int) -> None:
        self._total += size
        if self._total > self._limit:
            raise ForgedRowError(
                f"Nothing was imported: the values in the archive unpack to more than {self._limit >> 20} MiB, "
                "the limit for an archive of this size"
            )


def _check_references(target: sqlite3.Connection) -> None:
    """Raise ForgedRowError if a row refers to a row that is not in the archive: the reference could lead to a row that
    is stored here already."""
    for table, rowid, parent, _ in target.execute("PRAGMA foreign_key_check"):
        key = target.execute(f"SELECT * FROM {table} WHERE rowid = ?", (rowid,)).fetchone()
        name = key[0].hex() if isinstance(key[0], bytes) else key[0]
        raise ForgedRowError(
            f"Nothing was imported: {table} {name} refers to a row of {parent} that is not in the archive"
        )


def _check_chains(target: sqlite3.Connection) -> None:
    """Raise ForgedRowError for a chain that does not begin at a root, or whose lengths do not add up."""
    target.execute("CREATE INDEX archive_nodes_parent ON nodes (parent_id)")
    reachable = """
        WITH RECURSIVE chain (node_id) AS (
            SELECT node_id FROM nodes WHERE parent_id IS NULL
            UNION ALL SELECT nodes.node_id FROM nodes JOIN chain ON nodes.parent_id = chain.node_id
        ) SELECT (SELECT COUNT(*) FROM nodes) - (SELECT COUNT(*) FROM chain)
    """
    lengths = """
        SELECT COUNT(*) FROM nodes LEFT JOIN nodes AS before ON before.node_id = nodes.parent_id
        WHERE nodes.chain_length != nodes.length + COALESCE(before.chain_length, 0)
    """
    for query, problem in ((reachable, "form a circle"), (lengths, "have lengths that do not add up")):
        (found,) = target.execute(query).fetchone()
        if found:
            raise ForgedRowError(f"Nothing was imported: {found} nodes {problem}")


def _check_sizes(target: sqlite3.Connection, unpacked_limit: int) -> None:
    """Raise ForgedRowError if chains or conversations would expand to more than `unpacked_limit` entries in memory.

    This happens if a long chain has many branches, or if many calls have long conversations.
    """
    branches = """
        SELECT COALESCE(SUM((children - 1) * chain_length), 0) FROM nodes JOIN (
            SELECT parent_id AS parent, COUNT(*) AS children FROM nodes WHERE parent_id IS NOT NULL GROUP BY parent_id
        ) ON nodes.node_id = parent
    """
    messages = "SELECT COALESCE(SUM(message_count), 0) FROM calls"
    for query, limit, what in ((branches, unpacked_limit, "branching chains"), (messages, unpacked_limit, "messages")):
        (found,) = target.execute(query).fetchone()
        if found > limit:
            raise ForgedRowError(
                f"Nothing was imported: the {what} in the archive would need too much memory for an archive of this "
                f"size ({found})"
            )
