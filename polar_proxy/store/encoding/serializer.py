"""Converts calls to table rows: hashing, deduplication and compression. CPU work without the database, for one worker
thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from cachetools import LRUCache

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec
from polar_proxy.store.encoding.cells import CONTEXT, NO_IDS, CellCodec, bytes_before
from polar_proxy.store.encoding.chains import (
    MIN_SEGMENT,
    NO_CHAINS,
    ChainNode,
    RequestChains,
    bytes_chain,
    content_hash,
)
from polar_proxy.store.repositories.conversations import item_row
from polar_proxy.store.schema import calls
from polar_proxy.store.secrets import bytes_without_secrets, json_without_secrets, storable_text, without_secrets
from polar_proxy.types import FAILED, CallRecord, Choice, EngineInfo, Json, TokenIds, Usage

TableRow = dict[str, object]

_CACHED_TOOL_LISTS = 64
_CACHED_SETTINGS, _CACHED_SETTING_BYTES = 256, 4096
"""Number of cached parameter sets, and maximum size of their JSON."""
_CACHED_KEYS = 50_000
_LONGEST_PROVIDER_ID = 500
"""Length in characters above which a provider's id is not stored. PostgreSQL refuses rows whose indexed text is longer
than about 2,700 bytes."""
DEFAULT_CACHE_BYTES = 32 << 20

SAME_COLUMNS = tuple(field.name for field in fields(CallRecord) if field.name in calls.c)
"""The fields of a record that are columns of `calls` with the same name."""
USAGE_COLUMNS = {
    field.name: {"model": "usage_model", "estimated": "usage_estimated"}.get(field.name, field.name)
    for field in fields(Usage)
    if field.name != "cached_tokens"
}
"""The column of `calls` for each field of a usage. The field `cached_tokens` is missing here, because the column
`cached_tokens` is filled from `CallRecord.cached_tokens`."""
_same_columns = attrgetter(*SAME_COLUMNS)


@dataclass(slots=True)
class SessionCounters:
    """The amounts that a batch adds to the counters of one session."""

    calls: int = 0
    failed_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    price_usd: float | None = None
    last_call_at: float = 0.0


@dataclass(slots=True)
class RowBatch:
    """The rows of a batch of calls. Each table refers only to the tables before it."""

    engines: dict[bytes, TableRow] = field(default_factory=dict)
    settings: dict[bytes, TableRow] = field(default_factory=dict)
    nodes: dict[bytes, tuple[int, TableRow]] = field(default_factory=dict)
    """Node id -> (depth of the node in its chain, row)."""
    calls: list[TableRow] = field(default_factory=list)
    completions: list[TableRow] = field(default_factory=list)
    provider_ids: list[TableRow] = field(default_factory=list)
    conversation_items: list[TableRow] = field(default_factory=list)
    sessions: dict[str, SessionCounters] = field(default_factory=dict)
    refused: dict[int, Exception] = field(default_factory=dict)
    """The records that cannot be stored: position in the batch -> error. The batch has no rows of these records."""

    def count(self, record: CallRecord) -> None:
        """Add a call to the counters of its session."""
        counters = self.sessions.setdefault(record.session_id, SessionCounters())
        counters.calls += 1
        counters.failed_calls += record.status in FAILED
        counters.prompt_tokens += record.prompt_tokens
        counters.completion_tokens += record.completion_tokens
        if record.price_usd is not None:
            counters.price_usd = (counters.price_usd or 0.0) + record.price_usd
        counters.last_call_at = max(counters.last_call_at, record.ended_at)

    def node_rows(self) -> list[TableRow]:
        """Return the rows of the nodes, ordered by depth (parents first) and then by id, so that two gateways on
        PostgreSQL cannot deadlock."""
        return [row for _, _, row in sorted((depth, key, row) for key, (depth, row) in self.nodes.items())]

    def session_rows(self) -> list[TableRow]:
        return [
            {
                "of_session": session_id,
                "more_calls": counters.calls,
                "more_failed_calls": counters.failed_calls,
                "more_prompt_tokens": counters.prompt_tokens,
                "more_completion_tokens": counters.completion_tokens,
                "more_price_usd": counters.price_usd,
                "more_last_call_at": counters.last_call_at,
            }
            for session_id, counters in sorted(self.sessions.items())
        ]


class CallSerializer:
    """Turns records into rows. Leaves out the rows of nodes, settings and engines that `mark_stored` has seen.

    Used by one thread at a time.
    """

    def __init__(self, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        """`cache_bytes`: memory for the chains of the sessions' last requests. If the chains of a session do not fit,
        each of its calls hashes the whole conversation and prompt again."""
        self._codec = CellCodec()
        self._stored: OrderedDict[bytes, None] = OrderedDict()
        """Keys of rows that are known to be stored, the newest last. The oldest keys are dropped. The row of a dropped
        key is sent again, and the database ignores it."""
        self._chains: LRUCache[str, RequestChains] = LRUCache(cache_bytes, lambda chains: chains.size)
        """The chains of each session's last request."""
        self._engines: dict[EngineInfo, tuple[bytes, TableRow]] = {}
        self._clean_tools: LRUCache[bytes, bytes] = LRUCache(_CACHED_TOOL_LISTS)

    def serialize(self, records: Sequence[CallRecord]) -> RowBatch:
        """Return the rows of the records. `RowBatch.refused` names the records that cannot be stored."""
        batch = RowBatch()
        for position, record in enumerate(records):
            try:
                self._add(batch, record)
            except (StoreError, TypeError, ValueError, RecursionError, OverflowError, AttributeError) as error:
                batch.refused[position] = error
        return batch

    def mark_stored(self, batch: RowBatch) -> None:
        """Remember that the engines, settings and nodes of this batch are stored."""
        for key in (*batch.engines, *batch.settings, *batch.nodes):
            self._stored[key] = None
        while len(self._stored) > _CACHED_KEYS:
            self._stored.popitem(last=False)

    def forget(self) -> None:
        """Forget which engines, settings and nodes are stored, because another process may have deleted some."""
        self._stored.clear()
        self._chains.clear()

    def _add(self, batch: RowBatch, record: CallRecord) -> None:
        # Everything that can fail comes first: a refused record leaves nothing in the batch.
        last = self._chains.get(record.session_id, NO_CHAINS)
        message_nodes, shared = last.extend_messages(record.messages)
        new_messages = message_nodes[shared:]
        tool_nodes = bytes_chain("tools", [] if record.tools is None else [self._without_secrets(record.tools)])
        new_prompt_nodes, prompt_base = self._prompt_chain(record, last)
        cached_nodes = (*message_nodes[:shared], *(node.without_content() for node in new_messages))
        chains = _chains_of(record, cached_nodes, new_prompt_nodes, prompt_base)
        new_prompt_nodes, tail = self._split_tail(new_prompt_nodes, prompt_base)
        prompt_head = new_prompt_nodes[-1] if new_prompt_nodes else prompt_base
        params, sampling = _setting_row(record.params), _setting_row(record.sampling)
        before_answer = bytes_before(record.messages) if record.choices else b""
        completions = [self._completion_row(record, choice, before_answer) for choice in record.choices]
        engine = None if record.engine is None else self._engine_row(record.engine)
        turn = record.conversation
        items = [] if turn is None else [item_row(turn.conversation_id, item) for item in turn.items]
        columns = _own_columns(record)

        for key, row in (params, sampling):
            if key not in self._stored:
                batch.settings[key] = row
        if engine is not None and engine[0] not in self._stored:
            batch.engines[engine[0]] = engine[1]
        before = bytes_before(record.messages[:shared])
        for node, message in zip(new_messages, record.messages[shared:], strict=True):
            self._add_node(batch, node, before)
            before = (before + message[-CONTEXT:])[-CONTEXT:]
        for node in tool_nodes:
            self._add_node(batch, node, b"")
        for node in new_prompt_nodes:
            assert record.prompt_ids is not None
            self._add_node(batch, node, record.prompt_ids[: node.chain_length - node.length])

        batch.calls.append(
            columns
            | {
                "engine_hash": None if engine is None else engine[0],
                "message_count": len(message_nodes),
                "messages_node": message_nodes[-1].id if message_nodes else None,
                "tools_node": tool_nodes[-1].id if tool_nodes else None,
                "params_hash": params[0],
                "sampling_hash": sampling[0],
                "prompt_node": prompt_head.id if prompt_head else None,
                "prompt_tail": tail,
            }
        )
        batch.completions += completions
        batch.provider_ids += _provider_id_rows(record)
        batch.conversation_items += items
        batch.count(record)
        self._chains.pop(record.session_id, None)
        with suppress(ValueError):  # too large for the cache
            self._chains[record.session_id] = chains

    def _add_node(self, batch: RowBatch, node: ChainNode, before: bytes | TokenIds) -> None:
        """Add the node's row to the batch, unless it is there already or stored. `before`: see `node_row`."""
        if node.id not in self._stored and node.id not in batch.nodes:
            batch.nodes[node.id] = (node.depth, node_row(node, self._codec, before))

    def _prompt_chain(self, record: CallRecord, last: RequestChains) -> tuple[list[ChainNode], ChainNode | None]:
        if record.prompt_ids is None:
            return [], None
        _require_array(record.prompt_ids, np.int32, "prompt_ids")
        return last.extend_prompt(record.prompt_ids, _end_of_turn(record))

    def _without_secrets(self, tools: bytes) -> bytes:
        # Cached, because agents send the same list with every call.
        clean = self._clean_tools.get(tools)
        if clean is None:
            clean = bytes_without_secrets(tools)
            self._clean_tools[tools] = clean
        return clean

    def _split_tail(self, prompt: list[ChainNode], base: ChainNode | None) -> tuple[list[ChainNode], bytes | None]:
        """If the last segment is short, take it off the chain and pack it for the row of the call.

        A short last segment is the generation prompt. No other call shares these few tokens, and a row of their own
        would take ten times as much space.
        """
        if not prompt or prompt[-1].length >= MIN_SEGMENT or (len(prompt) == 1 and base is None):
            return prompt, None
        content = prompt[-1].content
        assert not isinstance(content, bytes)
        return prompt[:-1], self._codec.pack_ids(content)

    def _completion_row(self, record: CallRecord, choice: Choice, before: bytes) -> TableRow:
        _require_array(choice.token_ids, np.int32, "token_ids")
        _require_array(choice.logprobs, np.float32, "logprobs")
        if choice.token_ids.size != choice.logprobs.size:
            raise StoreError(
                f"choice {choice.index} has {choice.token_ids.size} tokens and {choice.logprobs.size} log-probabilities"
            )
        prompt = NO_IDS if record.prompt_ids is None else record.prompt_ids
        message = json_codec.dumps(choice.message.to_openai())
        turn = None if choice.provider_turn is None else json_codec.dumps(asdict(choice.provider_turn))
        return {
            "call_id": record.call_id,
            "choice_index": choice.index,
            "finish_reason": choice.finish_reason,
            "tokens": int(choice.token_ids.size),
            "message": self._codec.pack_bytes(message, before),
            "provider_turn": None if turn is None else self._codec.pack_bytes(turn, message),
            "token_ids": self._codec.pack_ids(choice.token_ids, prompt),
            "logprobs": self._codec.pack_logprobs(choice.logprobs),
            "reasoning_tokens": choice.reasoning_tokens,
            "versions": [list(run) for run in choice.versions] or None,
        }

    def _engine_row(self, info: EngineInfo) -> tuple[bytes, TableRow]:
        if info not in self._engines:
            self._engines[info] = engine_row(info)
        return self._engines[info]


def _own_columns(record: CallRecord) -> TableRow:
    """Return the columns of a call that depend on its record alone, without secrets."""
    columns: TableRow = dict(zip(SAME_COLUMNS, _same_columns(record), strict=True))
    for name in ("path", "model", "error", "thread"):
        columns[name] = storable_text(getattr(record, name))
    if record.provider_conversation is not None:
        columns["provider_conversation"] = json_codec.clean_text(record.provider_conversation)
    if record.fingerprint and isinstance(thread := record.fingerprint.get("thread"), str):
        columns["fingerprint"] = {**record.fingerprint, "thread": without_secrets(thread)}  # an id from a header
    if record.hooks:
        columns["hooks"] = _clean_hooks(record.hooks)
    return columns | {
        "prompt_tokens": None if record.prompt_ids is None else int(record.prompt_ids.size),
        "completion_tokens": sum(int(choice.token_ids.size) for choice in record.choices),
        **_usage_columns(record.usage),
    }


def _provider_id_rows(record: CallRecord) -> list[TableRow]:
    """Return the rows of the ids that a provider gave to a call's response and items. Too long ids are left out."""
    given = {**(record.response_items or {}), **({record.response_id: None} if record.response_id else {})}
    places = {json_codec.clean_text(provider_id): place for provider_id, place in given.items()}
    same: TableRow = {"call_id": record.call_id, "session_id": record.session_id}
    return [
        {**same, "provider_id": provider_id, "place": place}
        for provider_id, place in places.items()
        if len(provider_id or "") <= _LONGEST_PROVIDER_ID
    ]


def _usage_columns(usage: Usage | None) -> TableRow:
    """Return the columns of a usage, without `cached_tokens`, which comes from the record itself."""
    values: TableRow = {} if usage is None else asdict(usage)
    if usage is not None and usage.model is not None:
        values["model"] = json_codec.clean_text(usage.model)
    return {column: values.get(field) for field, column in USAGE_COLUMNS.items()}


def engine_row(info: EngineInfo) -> tuple[bytes, TableRow]:
    """Return the key and the row of an engine's description."""
    as_json = {**asdict(info), "capabilities": sorted(info.capabilities)}
    key = content_hash(json_codec.dumps(as_json))
    row: TableRow = {
        "engine_hash": key,
        "engine": info.engine,
        "version": info.version,
        "model": info.model,
        "info": as_json,
    }
    return key, row


def node_row(node: ChainNode, codec: CellCodec, before: bytes | TokenIds) -> TableRow:
    """Return the row of a node.

    `before`: the content of the chain before this node. For tokens, these are all earlier token ids (int32
    [chain_length - length]). For a message or a list of tools, give what `bytes_before` returns for the earlier nodes.
    """
    pack: Callable[[Any, Any], bytes] = codec.pack_ids if node.kind == "tokens" else codec.pack_bytes
    return {
        "node_id": node.id,
        "parent_id": node.parent,
        "kind": node.kind,
        "length": node.length,
        "chain_length": node.chain_length,
        "data": pack(node.content, before),
    }


def _end_of_turn(record: CallRecord) -> tuple[int, ...]:
    return record.engine.eos_token_ids if record.engine else ()


def _chains_of(
    record: CallRecord, messages: tuple[ChainNode, ...], prompt: list[ChainNode], prompt_base: ChainNode | None
) -> RequestChains:
    # The last segment ends with the prompt, where a longer prompt would not be cut.
    last_cut = prompt[-2] if len(prompt) > 1 else prompt_base
    ids = record.prompt_ids
    return RequestChains(
        messages=record.messages,
        message_nodes=messages,
        end_of_turn=_end_of_turn(record),
        prompt=np.empty(0, np.int32) if ids is None or last_cut is None else ids[: last_cut.chain_length].copy(),
        prompt_node=None if last_cut is None else last_cut.without_content(),
    )


def _clean_hooks(hooks: Json) -> Json:
    """Remove secrets from the changes that hooks made to a request. Messages stay unchanged, as in all records."""
    request = hooks.get("request", {})
    texts = {name: request[name] for name in ("messages",) if name in request}
    others = {name: value for name, value in request.items() if name not in texts}
    return {**hooks, **({"request": {**json_without_secrets(others), **texts}} if request else {})}


def _setting_row(value: Json) -> tuple[bytes, TableRow]:
    """Return the key and the row of the parameters of a call, without secrets."""
    raw = json_codec.dumps(value)
    return (_cached_setting if len(raw) <= _CACHED_SETTING_BYTES else _clean_setting)(raw)


def _clean_setting(raw: bytes) -> tuple[bytes, TableRow]:
    clean = json_without_secrets(json_codec.loads(raw))
    key = content_hash(json_codec.dumps(clean))
    return key, {"settings_hash": key, "value": clean}


_cached_setting = lru_cache(_CACHED_SETTINGS)(_clean_setting)  # agents send the same parameters with every call


def _require_array(array: object, dtype: type[np.generic], name: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise StoreError(f"{name} must be a one-dimensional array of {dtype.__name__}")
