"""Tokens of answers that came as text: encoded and scored later by an engine that did not sample them.

They stand beside the calls, never in them: a call that was recorded without tokens stays `no_tokens`. Only the traces
of the builder `rescored` are made of them, and `apply_rescores` is how such a trace is put together again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.base import Repository
from polar_proxy.store.chains import token_chain
from polar_proxy.store.codec import CellCodec
from polar_proxy.store.loader import CallLoader, engine_info, fetch, fetch_links
from polar_proxy.store.serializer import engine_row, node_row
from polar_proxy.types import CallRecord, EngineInfo, Logprobs, TokenIds

RESCORED_BUILDER = "rescored"
"""Whose traces take their tokens from here."""
Records = Callable[[], list[CallRecord]]
"""Unpacks calls: CPU work for a thread."""

_r = schema.rescores.c
_c = schema.calls.c


@dataclass(frozen=True, slots=True)
class Rescore:
    """One answer as tokens of `engine`: `prompt_ids` int32 [m], `token_ids` int32 [n], `logprobs` float32 [n] (nats,
    raw, teacher-forced behind the prompt)."""

    call_id: str
    choice: int
    engine: EngineInfo
    weight_version: str | None
    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: Logprobs


class RescoreRepository(Repository):
    async def put(self, session_id: str, rescores: Sequence[Rescore]) -> None:
        """Replace what was made of the session's answers before. Raises StoreError for arrays that do not fit."""
        for one in rescores:
            if one.token_ids.size != one.logprobs.size:
                raise StoreError(f"The answer {one.choice} of {one.call_id} has not one log-probability a token")
        packed = await asyncio.to_thread(_pack, rescores)
        of_session = select(_c.call_id).where(_c.session_id == session_id)
        async with self._database.writing() as connection:
            await connection.execute(delete(schema.rescores).where(_r.call_id.in_(of_session)))
            for table, rows in ((schema.engines, packed.engines), (schema.nodes, packed.nodes)):
                if rows:
                    await connection.execute(self._database.insert_new(table), rows)
            if packed.rescores:
                await connection.execute(insert(schema.rescores), packed.rescores)

    async def of_session(self, session_id: str) -> list[Rescore]:
        """By call and choice."""
        async with self._database.reading() as connection:
            unpack = await fetch_rescores(connection, _c.session_id == session_id)
        return await asyncio.to_thread(unpack)


def apply_rescores(calls: Iterable[CallRecord], rescores: Iterable[Rescore]) -> list[CallRecord]:
    """The calls, those without tokens of their own with the later ones where there are some for every answer.

    Their engine stays the one that sampled the text. Pure.
    """
    by_call: dict[str, dict[int, Rescore]] = {}
    for one in rescores:
        by_call.setdefault(one.call_id, {})[one.choice] = one
    return [_substituted(call, by_call.get(call.call_id, {})) for call in calls]


def _substituted(call: CallRecord, later: dict[int, Rescore]) -> CallRecord:
    if call.status != "no_tokens" or not call.choices or {choice.index for choice in call.choices} - later.keys():
        return call
    choices = tuple(
        replace(choice, token_ids=later[choice.index].token_ids, logprobs=later[choice.index].logprobs, versions=())
        for choice in call.choices
    )
    prompt = later[call.choices[0].index].prompt_ids
    return replace(call, status="ok", prompt_ids=prompt, choices=choices, logprob_mode="raw")


async def fetch_for(connection: AsyncConnection, where: ColumnElement[bool], builder: str) -> Records:
    """The calls that fulfil `where` (a condition on `calls`) as the traces of `builder` refer to them: without text."""
    found = await fetch(connection, where, text=False)
    if builder != RESCORED_BUILDER:
        return found.records
    later = await fetch_rescores(connection, where)
    return lambda: apply_rescores(found.records(), later())


async def fetch_rescores(connection: AsyncConnection, where: ColumnElement[bool]) -> Callable[[], list[Rescore]]:
    joined = schema.rescores.join(schema.calls, _c.call_id == _r.call_id).join(
        schema.engines, schema.engines.c.engine_hash == _r.engine_hash
    )
    query = select(schema.rescores, schema.engines.c.info).select_from(joined).where(where)
    rows = (await connection.execute(query.order_by(_r.call_id, _r.choice_index))).all()
    heads = select(_r.prompt_node.label("node_id")).join(schema.calls, _c.call_id == _r.call_id).where(where)
    links = await fetch_links(connection, heads.where(_r.prompt_node.is_not(None))) if rows else ()
    return lambda: _unpack(rows, CallLoader((), (), links))


def _unpack(rows: Sequence[Any], chains: CallLoader) -> list[Rescore]:
    codec = CellCodec()
    found = []
    for row in rows:
        prompt = chains.prompt(row.prompt_node)
        found.append(
            Rescore(
                call_id=row.call_id,
                choice=row.choice_index,
                engine=engine_info(row.info),
                weight_version=row.weight_version,
                prompt_ids=prompt,
                token_ids=codec.unpack_ids(row.token_ids, prompt),
                logprobs=codec.unpack_logprobs(row.logprobs),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Packed:
    engines: list[dict[str, object]]
    nodes: list[dict[str, object]]
    """Parents first."""
    rescores: list[dict[str, object]]


def _pack(rescores: Sequence[Rescore]) -> _Packed:
    codec, now = CellCodec(), time.time()
    engines: dict[bytes, dict[str, object]] = {}
    nodes: dict[bytes, dict[str, object]] = {}
    rows: list[dict[str, object]] = []
    for one in rescores:
        key, row = engine_row(one.engine)
        engines[key] = row
        prompt = one.prompt_ids
        chain = token_chain(prompt, one.engine.eos_token_ids)
        for node in chain:
            if node.id not in nodes:
                nodes[node.id] = node_row(node, codec, prompt[: node.total - node.length])
        rows.append(
            {
                "call_id": one.call_id,
                "choice_index": one.choice,
                "engine_hash": key,
                "weight_version": one.weight_version,
                "prompt_node": chain[-1].id if chain else None,
                "prompt_tokens": int(prompt.size),
                "token_ids": codec.pack_ids(one.token_ids, prompt),
                "logprobs": codec.pack_logprobs(one.logprobs.astype(np.float32, copy=False)),
                "created_at": now,
            }
        )
    return _Packed(list(engines.values()), list(nodes.values()), rows)
