"""Databases of every earlier schema, with data in them, are brought up and read back whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, MetaData, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.store import json_codec, migrate, open_store
from polar_proxy.store.chains import bytes_chain, token_chain
from polar_proxy.store.codec import CellCodec, pack_small_json
from polar_proxy.store.database import Database, make_file
from polar_proxy.store.serializer import CallSerializer
from polar_proxy.store.urls import normalise_url
from polar_proxy.types import CallRecord
from tests.factories import END, assert_same, call_record, joined_trace, token_ids

_FINGERPRINT = {
    "form": 1,
    "asked": "00" * 16,
    "ids": "ff" * 16,
    "answers": [{"end": "ab" * 16, "ids": ["call_ü"], "length": 3}],
}


@asynccontextmanager
async def _at(url: str, revision: str) -> AsyncIterator[AsyncConnection]:
    """A database that the migrations brought up to here, and no further."""
    database = Database(normalise_url(url))
    make_file(database)

    def up(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", "polar_proxy.store:migrations")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    try:
        async with database.writing() as connection:
            await connection.run_sync(up)
            yield connection
    finally:
        await database.close()


async def _write(connection: AsyncConnection, calls: list[CallRecord], revision: str) -> None:
    """The rows as that schema's Polar wrote them: whole prompts as chains, cells without what stands before them."""
    tables = MetaData()
    await connection.run_sync(lambda plain: tables.reflect(plain))
    codec = CellCodec()

    async def put(name: str, rows: list[dict[str, Any]]) -> None:
        columns = set(tables.tables[name].columns.keys())
        rows = [{key: value for key, value in row.items() if key in columns} for row in rows]
        for row in rows:
            await connection.execute(insert(tables.tables[name]), row)

    batch, refused = CallSerializer().pack(calls)
    assert not refused
    nodes: dict[bytes, dict[str, Any]] = {}
    heads: dict[str, bytes | None] = {}
    for call in calls:
        prompt = token_chain(call.prompt_ids, (END,)) if call.prompt_ids is not None else []
        heads[call.call_id] = prompt[-1].id if prompt else None
        tools = bytes_chain("tools", [call.tools] if call.tools is not None else [])
        for node in (*bytes_chain("message", call.messages), *tools, *prompt):
            content = node.content
            nodes[node.id] = {
                "node_id": node.id,
                "parent_id": node.parent,
                "kind": node.kind,
                "length": node.length,
                "total": node.total,
                "data": codec.pack_bytes(content) if isinstance(content, bytes) else codec.pack_ids(content),
            }
    first = calls[0]
    last = max(call.ended_at for call in calls)
    total = sum(0 if call.prompt_ids is None else call.prompt_ids.size for call in calls)
    sampled = sum(choice.token_ids.size for call in calls for choice in call.choices)
    await put(
        "sessions",
        [
            {
                "session_id": first.session_id,
                "origin": "key",
                "created_at": 1.0,
                "key_hash": bytes(32),
                "calls": len(calls),
                "failed_calls": sum(call.status != "ok" for call in calls),
                "prompt_tokens": int(total),
                "completion_tokens": int(sampled),
                "last_call_at": last,
            }
        ],
    )
    await put("engines", list(batch.engines.values()))
    await put("settings", list(batch.settings.values()))
    await put("nodes", list(nodes.values()))
    rows = [{**row, "prompt_node": heads[str(row["call_id"])], "prompt_tail": None} for row in batch.calls]
    if revision >= "0005":
        rows = [
            {**row, "fingerprint": row["fingerprint"] and pack_small_json(json_codec.dumps(row["fingerprint"]))}
            for row in rows
        ]
    await put("calls", rows)
    cells = [
        {
            "call_id": call.call_id,
            "choice_index": choice.index,
            "finish_reason": choice.finish_reason,
            "tokens": choice.token_ids.size,
            "message": codec.pack_bytes(json_codec.dumps(choice.message.to_openai())),
            "token_ids": codec.pack_ids(choice.token_ids),
            "logprobs": codec.pack_logprobs(choice.logprobs),
        }
        for call in calls
        for choice in call.choices
    ]
    await put("completions", cells)


_EARLIER = ["0001", "0002", "0003", "0004", "0005", "0006", "0007"]


def test_every_earlier_revision_is_tried() -> None:
    assert [*_EARLIER, migrate.HEAD] == [f"{number:04}" for number in range(1, len(_EARLIER) + 2)]


@pytest.mark.parametrize("revision", _EARLIER)
async def test_data_comes_up(url: str, tmp_path: Path, revision: str) -> None:
    turn = [(13 * n) % 9000 + 10 for n in range(80)]
    placed = (
        {"rule": "extends", "thread": "main", "ambiguous": True, "fingerprint": _FINGERPRINT}
        if revision >= "0002"
        else {}
    )
    made = {"prompt_reason": "no_base", "base_call_id": "call_x", "base_choice": 1} if revision >= "0003" else {}
    calls = [
        call_record("sess_old", prompt_ids=token_ids(*turn, END, 1, 2, 3), started_at=1.0, **placed, **made),
        call_record(
            "sess_old", prompt_ids=token_ids(*turn, END, *turn, END, 1, 2), started_at=2.0, messages=(b"", b"x")
        ),
        call_record(
            "sess_old", prompt_ids=None, choices=(), status="upstream_error", engine=None, started_at=3.0, tools=None
        ),
    ]
    async with _at(url, revision) as connection:
        await _write(connection, calls, revision)
    async with open_store(url, artifacts=tmp_path / "artifacts") as store:
        assert await store.schema_revision() == migrate.HEAD
        assert_same(await store.calls.of_session("sess_old"), calls)
        assert [place.fingerprint for place in await store.calls.lineages("sess_old")] == [
            placed.get("fingerprint"),
            None,
            None,
        ]
        assert await store.maintenance.verify() == []
        trace = joined_trace([calls[0]])
        await store.traces.put([trace], {}, "merged", "sess_old")
        assert_same(await store.traces.find(session_id="sess_old"), [trace])
        later = call_record("sess_old", prompt_ids=token_ids(*turn, END, *turn, END, 1, 2, 3, 4), started_at=4.0)
        await store.calls.commit(later)  # goes on from what the older Polar stored
        assert_same(await store.calls.of_session("sess_old"), [*calls, later])
        assert await store.maintenance.verify() == []
