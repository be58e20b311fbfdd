"""Rescores: tokens and log-probabilities of answers that were recorded as text. An engine that did not sample these
answers computes the rescores later.

Rescores are stored in their own table and never change the calls: a call that was recorded without tokens keeps the
status `no_tokens`. Only the traces of the builder `rescored` use rescores; `apply_rescores` puts the rescored tokens
into the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, delete, insert, select

from polar_proxy.errors import StoreError
from polar_proxy.store import schema
from polar_proxy.store.database import Repository
from polar_proxy.store.encoding.cells import CellCodec
from polar_proxy.store.encoding.chains import token_chain
from polar_proxy.store.encoding.loader import OF_SESSION, CallLoader, engine_info, fetch, fetch_nodes
from polar_proxy.store.encoding.serializer import RowBatch, TableRow, engine_row, node_row
from polar_proxy.types import CallRecord, EngineInfo, Logprobs, TokenIds

RESCORED_BUILDER = "rescored"
"""Name of the builder whose traces use rescores."""
_rs = schema.rescores.c
_c = schema.calls.c


@dataclass(frozen=True, slots=True)
class Rescore:
    """The tokens and log-probabilities that `engine` computed for one answer.

    `prompt_ids`: int32 [m], `token_ids`: int32 [n]. `logprobs`: float32 [n], in nats, from the model's own
    distribution of each token, given the prompt and the answer's earlier tokens (teacher forcing).
    """

    call_id: str
    choice: int
    engine: EngineInfo
    weight_version: str | None
    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class BuilderCalls:
    """The same calls twice: as they were recorded, and as a builder makes traces from them.

    They differ only for the builder `rescored`: it uses rescored tokens where no tokens were recorded.
    """

    recorded: list[CallRecord]
    of_traces: list[CallRecord]


class RescoreRepository(Repository):
    """The stored rescores of sessions: tokens and log-probabilities of answers that were recorded as text."""

    async def put(self, session_id: str, rescores: Sequence[Rescore]) -> None:
        """Replace the rescores of the session. Raises StoreError for arrays of different lengths."""
        for one in rescores:
            if one.token_ids.size != one.logprobs.size:
                raise StoreError(
                    f"The answer {one.choice} of {one.call_id} has {one.token_ids.size} tokens "
                    f"and {one.logprobs.size} log-probabilities"
                )
        shared, rows = await asyncio.to_thread(_serialize, rescores)
        of_session = select(_c.call_id).where(_c.session_id == session_id)

        def write(connection: Connection) -> None:
            connection.execute(delete(schema.rescores).where(_rs.call_id.in_(of_session)))
            for statement, values in (
                (self._database.insert_new(schema.engines), list(shared.engines.values())),
                (self._database.insert_new(schema.nodes), shared.node_rows()),
                (insert(schema.rescores), rows),
            ):
                if values:
                    connection.execute(statement, values)

        await self._database.write(write)

    async def of_session(self, session_id: str) -> list[Rescore]:
        """Return the rescores of a session, ordered by call and choice."""
        mine = {"session": session_id}
        load = await self._database.read(lambda connection: _fetch_rescores(connection, OF_SESSION, mine))
        return await asyncio.to_thread(load)


def apply_rescores(calls: Iterable[CallRecord], rescores: Iterable[Rescore]) -> list[CallRecord]:
    """Return the calls. Each call that has no tokens gets the rescored tokens, if all of its answers were rescored.

    The call's `engine` is still the engine that sampled the text.
    """
    by_call: dict[str, dict[int, Rescore]] = {}
    for one in rescores:
        by_call.setdefault(one.call_id, {})[one.choice] = one
    return [_apply(call, by_call.get(call.call_id, {})) for call in calls]


def _apply(call: CallRecord, rescores: dict[int, Rescore]) -> CallRecord:
    is_complete = not {choice.index for choice in call.choices} - rescores.keys()
    if call.status != "no_tokens" or not call.choices or not is_complete:
        return call
    answers = [(choice, rescores[choice.index]) for choice in call.choices]
    choices = [replace(choice, token_ids=one.token_ids, logprobs=one.logprobs, versions=()) for choice, one in answers]
    prompt = answers[0][1].prompt_ids
    # A hosted model samples at its provider's default if the client names no temperature; these are at temperature 1.
    sampling = {"temperature": 1.0, **call.sampling}
    return replace(call, status="ok", prompt_ids=prompt, choices=tuple(choices), logprob_mode="raw", sampling=sampling)


def fetch_for(
    connection: Connection,
    where: ColumnElement[bool],
    values: Mapping[str, object],
    builder: str,
    *,
    text: bool = False,
) -> Callable[[], BuilderCalls]:
    """Read the calls that meet `where`, and their rescores if `builder` uses rescores. Return a function that unpacks
    the calls. `values`: the values of the parameters in `where`."""
    loader = fetch(connection, where, values, text=text)
    load_rescores = _fetch_rescores(connection, where, values) if builder == RESCORED_BUILDER else None

    def load() -> BuilderCalls:
        calls = loader.records()
        return BuilderCalls(calls, calls if load_rescores is None else apply_rescores(calls, load_rescores()))

    return load


def _fetch_rescores(
    connection: Connection, where: ColumnElement[bool], values: Mapping[str, object]
) -> Callable[[], list[Rescore]]:
    """Read the rescores of the calls that meet `where`, and return a function that unpacks them."""
    joined = schema.rescores.join(schema.calls, _c.call_id == _rs.call_id).join(
        schema.engines, schema.engines.c.engine_hash == _rs.engine_hash
    )
    query = select(schema.rescores, schema.engines.c.info).select_from(joined).where(where)
    rows = connection.execute(query.order_by(_rs.call_id, _rs.choice_index), values).all()
    heads = select(_rs.prompt_node.label("node_id")).join(schema.calls, _c.call_id == _rs.call_id).where(where)
    nodes = fetch_nodes(connection, heads.where(_rs.prompt_node.is_not(None)), values) if rows else ()
    return lambda: _load(rows, CallLoader(nodes))


def _load(rows: Sequence[Any], loader: CallLoader) -> list[Rescore]:
    codec = CellCodec()
    found = []
    for row in rows:
        prompt = loader.prompt(row.prompt_node)
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


def _serialize(rescores: Sequence[Rescore]) -> tuple[RowBatch, list[TableRow]]:
    """Return the rows of the engines and nodes that the rescores refer to, and the rows of the rescores themselves."""
    codec, now = CellCodec(), time.time()
    shared = RowBatch()
    rows: list[TableRow] = []
    for one in rescores:
        key, engine = engine_row(one.engine)
        shared.engines[key] = engine
        prompt = one.prompt_ids
        chain = token_chain(prompt, one.engine.eos_token_ids)
        for node in chain:
            if node.id not in shared.nodes:
                before = prompt[: node.chain_length - node.length]
                shared.nodes[node.id] = (node.depth, node_row(node, codec, before))
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
    return shared, rows
