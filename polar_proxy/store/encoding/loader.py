"""Converts table rows to records of calls. The records are equal to the ones that were committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from sqlalchemy import CTE, ColumnElement, CompoundSelect, Connection, Select, bindparam, select, union

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec
from polar_proxy.store.encoding.cells import CONTEXT, CellCodec, TokenPrefix, bytes_before
from polar_proxy.store.encoding.chains import NodeKind
from polar_proxy.store.encoding.serializer import SAME_COLUMNS, USAGE_COLUMNS
from polar_proxy.store.schema import calls, completions, engines, nodes, settings
from polar_proxy.types import CallRecord, Choice, EngineInfo, Json, Message, ProviderTurn, TokenIds, Usage

_c = calls.c
_TEXT_COLUMNS = ("fingerprint", "message_count", "messages_node", "tools_node")
"""Columns of `calls` that `fetch` reads only with `text`."""
_COPIED_COLUMNS = tuple(name for name in SAME_COLUMNS if name not in _TEXT_COLUMNS)
"""The first columns of each row that `fetch` reads. `CallRecord` has fields with the same names and values."""
_OTHER_COLUMNS = (
    *("engine_hash", "params_hash", "sampling_hash", "prompt_node", "prompt_tail", "prompt_tokens"),
    *("completion_tokens", *USAGE_COLUMNS.values()),
)

OF_SESSION = _c.session_id == bindparam("session")
OF_SESSIONS = _c.session_id.in_(bindparam("sessions", expanding=True))
"""Conditions for `fetch`. `OF_SESSION` selects the calls of one session (bound parameter `session`), `OF_SESSIONS` the
calls of several sessions (bound parameter `sessions`). Both are constants, so that `fetch` builds the statements for
each of them only once (`_statements`)."""


@dataclass(frozen=True)
class _Statements:
    """The SQL statements with which `fetch` reads the calls that match one condition. They run in this order."""

    calls: Select[Any]
    answers: Select[Any]
    settings: Select[Any]
    engines: Select[Any]
    nodes: Select[Any]


def fetch(
    connection: Connection,
    where: ColumnElement[bool],
    values: Mapping[str, object] = MappingProxyType({}),
    *,
    text: bool = True,
) -> CallLoader:
    """Read all rows of the calls that meet `where`, a condition on `calls`. This takes five statements, which read each
    shared node once.

    `values`: the values of the bound parameters in `where`. Without `text` the records have the tokens of prompts and
    answers, but no messages, tools or fingerprint, and the messages of their answers are empty.
    """
    statements = _statements(where, text)
    call_rows = connection.execute(statements.calls, values).all()
    if not call_rows:
        return CallLoader(())
    answer_rows = connection.execute(statements.answers, values).all()
    shared = {bytes(key): value for key, value in connection.execute(statements.settings, values)}
    shared |= {bytes(key): info for key, info in connection.execute(statements.engines, values)}
    node_rows = connection.execute(statements.nodes, values).all()
    return CallLoader(node_rows, call_rows, answer_rows, shared, text=text)


@lru_cache(maxsize=64)
def _statements(where: ColumnElement[bool], text: bool) -> _Statements:
    names = (*_COPIED_COLUMNS, *_OTHER_COLUMNS, *(_TEXT_COLUMNS if text else ()))
    answer_columns = [column for column in completions.c if text or column.name not in ("message", "provider_turn")]
    answers = select(*answer_columns).join(calls, _c.call_id == completions.c.call_id).where(where)
    used = union(*(select(column).where(where) for column in (_c.params_hash, _c.sampling_hash))).subquery()
    sampled_by = engines.c.engine_hash.in_(select(_c.engine_hash).where(where))
    node_columns = (_c.prompt_node, *((_c.messages_node, _c.tools_node) if text else ()))
    heads = union(*(select(column.label("node_id")).where(where, column.is_not(None)) for column in node_columns))
    return _Statements(
        calls=select(*(_c[name] for name in names)).where(where).order_by(_c.started_at, _c.call_id),
        answers=answers.order_by(completions.c.call_id, completions.c.choice_index),
        settings=select(settings).join(used, used.c[0] == settings.c.settings_hash),
        engines=select(engines.c.engine_hash, engines.c.info).where(sampled_by),
        nodes=_nodes_of_chains(heads),
    )


def fetch_nodes(
    connection: Connection,
    heads: Select[Any] | CompoundSelect[Any],
    values: Mapping[str, object] = MappingProxyType({}),
) -> Sequence[Any]:
    """Read all nodes of some chains. A node of several chains is read once.

    `heads`: a query that selects, as `node_id`, the last node of each chain.
    """
    nodes: Sequence[Any] = connection.execute(_nodes_of_chains(heads), values).all()
    return nodes


def _nodes_of_chains(heads: Select[Any] | CompoundSelect[Any]) -> Select[Any]:
    chain = chain_ids(heads)
    query = select(nodes.c.node_id, nodes.c.parent_id, nodes.c.chain_length, nodes.c.length, nodes.c.data)
    return query.join(chain, chain.c.node_id == nodes.c.node_id)


def chain_ids(heads: Select[Any] | CompoundSelect[Any]) -> CTE:
    """Select the ids, as `node_id`, of all nodes of the chains that end at `heads`."""
    ends = heads.subquery()
    chain = select(ends.c.node_id).cte("chain", recursive=True)
    return chain.union(
        select(nodes.c.parent_id).join(chain, chain.c.node_id == nodes.c.node_id).where(nodes.c.parent_id.is_not(None))
    )


class CallLoader:
    """Turns fetched rows into records. CPU work without the database: use a thread if there are many rows."""

    def __init__(
        self,
        node_rows: Sequence[Any],
        call_rows: Sequence[Any] = (),
        answer_rows: Sequence[Any] = (),
        shared: Mapping[bytes, Json] = MappingProxyType({}),
        *,
        text: bool = True,
    ) -> None:
        """`shared`: settings and engines by hash. Records refer to these objects without a copy: do not change them."""
        self._text = text
        self._shared = shared
        self._call_rows = call_rows
        self._answer_rows: dict[str, list[Any]] = defaultdict(list)
        for row in answer_rows:
            self._answer_rows[row.call_id].append(row)
        self._codec = CellCodec()
        self._nodes = {bytes(row.node_id): row for row in node_rows}
        self._contents: dict[bytes, bytes] = {}
        self._conversations: dict[bytes | None, tuple[bytes, ...]] = {None: ()}
        self._last_context: tuple[bytes | None, bytes] = (None, b"")
        """The last node of the conversation that was read last, and its context (see `_context`). The next conversation
        usually continues this one."""
        self._prompts: dict[bytes | None, TokenPrefix] = {None: TokenPrefix.empty()}
        self._engines: dict[bytes, EngineInfo] = {}
        self._tails: dict[bytes, tuple[bytes, int]] = {}

    def records(self) -> list[CallRecord]:
        # All prompts are read before the first array is made, so that they share one array.
        for row in self._call_rows:
            self._prompt(row.prompt_node, row.prompt_tail)
        return [self.record(row) for row in self._call_rows]

    def rows(self) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield each row of `calls` with its rows of `completions`."""
        for row in self._call_rows:
            yield row, self._answer_rows[row.call_id]

    def record(self, row: Any) -> CallRecord:
        """Return the record of one row of `calls`."""
        prompt = None if row.prompt_tokens is None else self._prompt(row.prompt_node, row.prompt_tail)
        messages: tuple[bytes, ...] = ()
        tools = fingerprint = None
        if self._text:
            messages = self._conversation(row.messages_node)
            if len(messages) != row.message_count:
                raise StoreError(
                    f"A call has {row.message_count} messages, but {len(messages)} are stored: the database is damaged"
                )
            tools = None if row.tools_node is None else self._content(row.tools_node, b"")
            fingerprint = row.fingerprint
        answers = self._answer_rows[row.call_id]
        before_answer = self._context(row.messages_node) if self._text else b""
        return CallRecord(
            **dict(zip(_COPIED_COLUMNS, row, strict=False)),
            engine=None if row.engine_hash is None else self._engine(row.engine_hash),
            fingerprint=fingerprint,
            usage=_usage(row),
            messages=messages,
            tools=tools,
            params=self._shared_value(row.params_hash),
            sampling=self._shared_value(row.sampling_hash),
            prompt_ids=None if prompt is None else prompt.ids,
            choices=tuple(self._choice(answer, prompt or TokenPrefix.empty(), before_answer) for answer in answers),
        )

    def _choice(self, answer: Any, prompt: TokenPrefix, before: bytes) -> Choice:
        message = self._codec.unpack_bytes(answer.message, before) if self._text else None
        return Choice(
            index=answer.choice_index,
            message=Message("assistant") if message is None else Message.from_openai(json_codec.loads(message)),
            provider_turn=None if message is None else self._provider_turn(answer.provider_turn, message),
            finish_reason=answer.finish_reason,
            token_ids=self._codec.unpack_ids(answer.token_ids, prompt),
            logprobs=self._codec.unpack_logprobs(answer.logprobs),
            versions=tuple((start, version) for start, version in answer.versions or ()),
            reasoning_tokens=answer.reasoning_tokens,
        )

    def _provider_turn(self, cell: bytes | None, message: bytes) -> ProviderTurn | None:
        if cell is None:
            return None
        turn = json_codec.loads(self._codec.unpack_bytes(cell, message))
        return ProviderTurn(turn["provider"], tuple(turn["content"]))

    def _engine(self, key: bytes) -> EngineInfo:
        if key not in self._engines:
            self._engines[key] = engine_info(self._shared_value(key))
        return self._engines[key]

    def _shared_value(self, key: bytes) -> Json:
        if key not in self._shared:
            raise StoreError(f"The row {bytes(key).hex()} that a call refers to is missing: the database is damaged")
        return self._shared[key]

    def node(self, node: bytes) -> Any:
        """Return the row of the node with this id. Raises StoreError if the row is missing."""
        if node not in self._nodes:
            raise StoreError(f"The node {node.hex()} of a stored chain is missing: the database is damaged")
        return self._nodes[node]

    def chain(self, head: bytes | None, known: Container[bytes | None] = ()) -> list[bytes]:
        """Return the ids of the chain that ends at `head`, root first, without the nodes that are `known`."""
        new: list[bytes] = []
        while head is not None and head not in known:
            new.append(head)
            head = self.node(head).parent_id
            if len(new) > len(self._nodes):
                raise StoreError("The nodes of a stored chain form a circle: the database is damaged")
        new.reverse()
        return new

    def content(self, node: bytes, kind: NodeKind) -> bytes:
        """Return the content of one chain node (see `chains.py`). Token ids are little-endian int32."""
        if kind == "tokens":
            parent = self.node(node).parent_id
            start = 0 if parent is None else self.node(parent).chain_length
            return np.ascontiguousarray(self.prompt(node)[start:], "<i4").tobytes()
        if node not in self._contents:
            self._conversation(node)
        return self._contents[node]

    def _conversation(self, head: bytes | None) -> tuple[bytes, ...]:
        new = self.chain(head, self._conversations)
        known = self.node(new[0]).parent_id if new else head
        found, context = list(self._conversations[known]), self._context(known)
        for node in new:
            found.append(self._content(node, context))
            context = (context + found[-1])[-CONTEXT:]
        messages = self._conversations[head] = tuple(found)
        self._last_context = (head, context)
        return messages

    def _context(self, head: bytes | None) -> bytes:
        """Return the last `CONTEXT` bytes of a conversation that this loader has unpacked already."""
        if self._last_context[0] != head:
            self._last_context = (head, bytes_before(self._conversations[head]))
        return self._last_context[1]

    def _content(self, node: bytes, before: bytes) -> bytes:
        if node not in self._contents:
            self._contents[node] = self._codec.unpack_bytes(self.node(node).data, before)
        return self._contents[node]

    def prompt(self, head: bytes | None) -> TokenIds:
        """Return the prompt whose chain ends at `head`. Read-only; prompts with a common beginning share memory."""
        return self._prompt(head, None).ids

    def _prompt(self, head: bytes | None, tail: bytes | None) -> TokenPrefix:
        """Return the tokens of the chain that ends at `head`, followed by the packed tokens `tail`."""
        new = self.chain(head, self._prompts)
        prompt = self._prompts[self.node(new[0]).parent_id if new else head]
        for node in new:
            row = self.node(node)
            prompt = prompt.extended(*self._codec.unpack_id_bytes(row.data, prompt))
            if prompt.size != row.chain_length:
                raise StoreError("A prompt and its chain have different lengths: the database is damaged")
            self._prompts[node] = prompt
        if tail is None:
            return prompt
        if tail not in self._tails:  # cached, because most calls have the same: the generation prompt
            self._tails[tail] = self._codec.unpack_id_bytes(tail)
        return prompt.extended(*self._tails[tail])


def _usage(row: Any) -> Usage | None:
    if row.input_tokens is None:
        return None
    values = {field: getattr(row, column) for field, column in USAGE_COLUMNS.items()}
    return Usage(**values, cached_tokens=row.cached_tokens)


def engine_info(info: Json) -> EngineInfo:
    """Return the description of an engine from its JSON."""
    capabilities, ends = frozenset(info["capabilities"]), tuple(info.get("eos_token_ids", ()))
    return EngineInfo(**{**info, "capabilities": capabilities, "eos_token_ids": ends})
