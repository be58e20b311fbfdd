"""Calls read back: rows and chains to records, equal to what was committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import CTE, ColumnElement, CompoundSelect, Select, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import jsontext
from polar_proxy.store.buffers import Tokens
from polar_proxy.store.codec import NO_IDS, Codec, bytes_before
from polar_proxy.store.schema import calls, completions, engines, nodes, settings
from polar_proxy.types import CallRecord, Choice, EngineInfo, Json, TokenIds

_params = settings.alias("params")
_sampling = settings.alias("sampling")


async def fetch(connection: AsyncConnection, where: ColumnElement[bool], *, text: bool = True) -> Fetched:
    """All rows behind the calls that fulfil `where` (a condition on `calls`): four statements, each node once.

    Without `text` the records have tokens, but no messages and tools, and their answers are empty messages.
    """
    rows = (
        await connection.execute(
            select(
                calls,
                engines.c.info.label("engine_info"),
                _params.c.value.label("params"),
                _sampling.c.value.label("sampling"),
            )
            .join(_params, _params.c.settings_hash == calls.c.params_hash)
            .join(_sampling, _sampling.c.settings_hash == calls.c.sampling_hash)
            .outerjoin(engines, engines.c.engine_hash == calls.c.engine_hash)
            .where(where)
            .order_by(calls.c.started_at, calls.c.call_id)
        )
    ).all()
    if not rows:
        return Fetched((), (), ())
    chosen = (
        await connection.execute(
            select(completions)
            .join(calls, calls.c.call_id == completions.c.call_id)
            .where(where)
            .order_by(completions.c.call_id, completions.c.choice_index)
        )
    ).all()
    columns = (calls.c.prompt_node, *((calls.c.messages_node, calls.c.tools_node) if text else ()))
    heads = union(*(select(column.label("node_id")).where(where, column.is_not(None)) for column in columns))
    return Fetched(rows, chosen, await fetch_links(connection, heads), text=text)


async def fetch_links(connection: AsyncConnection, heads: Select[Any] | CompoundSelect[Any]) -> Sequence[Any]:
    """All nodes of the chains that end at `heads` (a query for `node_id`), each once."""
    chain = chains_of(heads)
    query = select(nodes.c.node_id, nodes.c.parent_id, nodes.c.total, nodes.c.length, nodes.c.data)
    return (await connection.execute(query.join(chain, chain.c.node_id == nodes.c.node_id))).all()


def chains_of(heads: Select[Any] | CompoundSelect[Any]) -> CTE:
    """The ids of all nodes of the chains that end at `heads`, as `node_id`."""
    ends = heads.subquery()
    chain = select(ends.c.node_id).cte("chain", recursive=True)
    return chain.union(
        select(nodes.c.parent_id).join(chain, chain.c.node_id == nodes.c.node_id).where(nodes.c.parent_id.is_not(None))
    )


class Fetched:
    """What `fetch` found. Unpacking is CPU work without the database: do it in a thread when there is much."""

    def __init__(self, rows: Sequence[Any], chosen: Sequence[Any], links: Sequence[Any], *, text: bool = True) -> None:
        self._text = text
        self._rows = rows
        self._chosen = chosen
        self._codec = Codec()
        self._links = {bytes(link.node_id): link for link in links}
        self._bytes: dict[bytes, bytes] = {}
        self._conversations: dict[bytes | None, tuple[bytes, ...]] = {None: ()}
        self._prompts: dict[bytes | None, Tokens] = {None: Tokens.none()}

    def records(self) -> list[CallRecord]:
        chosen: dict[str, list[Any]] = defaultdict(list)
        for row in self._chosen:
            chosen[row.call_id].append(row)
        infos: dict[bytes, EngineInfo] = {}
        return [self._record(row, chosen[row.call_id], infos) for row in self._rows]

    def _record(self, row: Any, chosen: Sequence[Any], infos: dict[bytes, EngineInfo]) -> CallRecord:
        engine = None
        if row.engine_hash is not None:
            if row.engine_hash not in infos:
                infos[row.engine_hash] = engine_info(row.engine_info)
            engine = infos[row.engine_hash]
        messages = self._messages(row.messages_node, row.message_count) if self._text else ()
        prompt = None if row.prompt_tokens is None else self.prompt(row.prompt_node, row.prompt_tail)
        return CallRecord(
            call_id=row.call_id,
            session_id=row.session_id,
            dialect=row.dialect,
            path=row.path,
            stream=row.stream,
            model=row.model,
            engine=engine,
            weight_version=row.weight_version,
            logprob_mode=row.logprob_mode,
            status=row.status,
            http_status=row.http_status,
            error=row.error,
            edge=row.edge,
            parent_call_id=row.parent_call_id,
            rule=row.rule,
            ambiguous=row.ambiguous,
            thread=row.thread,
            marks=row.marks,
            prompt_mode=row.prompt_mode,
            prompt_reason=row.prompt_reason,
            base_call_id=row.base_call_id,
            base_choice=row.base_choice,
            messages=messages,
            tools=None if row.tools_node is None or not self._text else self._content(row.tools_node, ()),
            params=row.params,
            sampling=row.sampling,
            prompt_ids=prompt,
            choices=self._choices(chosen, messages, prompt),
            started_at=row.started_at,
            first_token_at=row.first_token_at,
            ended_at=row.ended_at,
            cached_tokens=row.cached_tokens,
        )

    def _choices(self, chosen: Sequence[Any], messages: Sequence[bytes], prompt: TokenIds | None) -> tuple[Choice, ...]:
        before = bytes_before(messages) if chosen and self._text else b""
        return tuple(
            Choice(
                index=row.choice_index,
                message=jsontext.loads(self._codec.unpack_bytes(row.message, before)) if self._text else {},
                finish_reason=row.finish_reason,
                token_ids=self._codec.unpack_ids(row.token_ids, NO_IDS if prompt is None else prompt),
                logprobs=self._codec.unpack_logprobs(row.logprobs),
                versions=tuple((start, version) for start, version in row.versions or ()),
            )
            for row in chosen
        )

    def _messages(self, head: bytes | None, count: int) -> tuple[bytes, ...]:
        new: list[bytes] = []
        node = head
        while node is not None and node not in self._conversations:
            new.append(node)
            node = self._link(node).parent_id
        found = list(self._conversations[node])
        for node in reversed(new):
            found.append(self._content(node, found))
        if len(found) != count:
            raise StoreError(f"A conversation of {count} messages has {len(found)} stored: the database is damaged")
        messages = self._conversations[head] = tuple(found)
        return messages

    def _link(self, node: bytes) -> Any:
        if node not in self._links:
            raise StoreError(f"The node {node.hex()} of a stored chain is missing: the database is damaged")
        return self._links[node]

    def _content(self, node: bytes, above: Sequence[bytes]) -> bytes:
        if node not in self._bytes:
            self._bytes[node] = self._codec.unpack_bytes(self._link(node).data, bytes_before(above))
        return self._bytes[node]

    def prompt(self, head: bytes | None, tail: bytes | None = None) -> TokenIds:
        """The prompt whose chain ends at `head`, with the packed tokens that come behind it. Read-only; prompts that
        begin alike share their memory."""
        new: list[bytes] = []
        node = head
        while node is not None and node not in self._prompts:
            new.append(node)
            node = self._link(node).parent_id
        prompt = self._prompts[node]
        for node in reversed(new):
            link = self._link(node)
            prompt = prompt.and_then(self._codec.unpack_ids(link.data, prompt.ids))
            if prompt.size != link.total:
                raise StoreError("A prompt has not as many tokens as its chain counts: the database is damaged")
            self._prompts[node] = prompt
        return prompt.ids if tail is None else prompt.and_then(self._codec.unpack_ids(tail)).ids


def engine_info(info: Json) -> EngineInfo:
    """An engine's description, as it was before it was stored."""
    return EngineInfo(
        **{
            **info,
            "capabilities": frozenset(info["capabilities"]),
            "eos_token_ids": tuple(info.get("eos_token_ids", ())),
        }
    )
