"""A batch of calls as table rows: hashing, deduplication and compression. Pure CPU work, run in one worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec
from polar_proxy.store.chains import SHORTEST_TURN, ChainNode, StoredKeys, bytes_chain, content_hash
from polar_proxy.store.codec import NO_IDS, CellCodec, bytes_before
from polar_proxy.store.memo import ChainCache, RequestChains, message_chain, prompt_chain
from polar_proxy.store.secrets import bytes_without_secrets, json_without_secrets, without_secrets
from polar_proxy.types import CallRecord, Choice, EngineInfo, Json, TokenIds

Row = dict[str, object]

_TOOL_LISTS = 64


@dataclass(slots=True)
class SessionCounters:
    """What a batch adds to the counters of one session."""

    calls: int = 0
    failed: int = 0
    prompt: int = 0
    completion: int = 0
    last: float = 0.0


@dataclass(slots=True)
class RowBatch:
    """Rows to insert, in the order of the fields (each refers only to earlier ones), and what to add to sessions."""

    engines: dict[bytes, Row] = field(default_factory=dict)
    settings: dict[bytes, Row] = field(default_factory=dict)
    nodes: dict[bytes, tuple[int, Row]] = field(default_factory=dict)
    calls: list[Row] = field(default_factory=list)
    completions: list[Row] = field(default_factory=list)
    sessions: dict[str, SessionCounters] = field(default_factory=dict)

    def node_rows(self) -> list[Row]:
        """Parents first; among equals by id, so that two gateways on PostgreSQL never wait for each other in a ring."""
        return [row for _, _, row in sorted((depth, key, row) for key, (depth, row) in self.nodes.items())]

    def session_rows(self) -> list[Row]:
        return [
            {
                "of_session": key,
                "more_calls": counts.calls,
                "more_failed": counts.failed,
                "more_prompt": counts.prompt,
                "more_completion": counts.completion,
                "last": counts.last,
            }
            for key, counts in sorted(self.sessions.items())
        ]


SerializedCalls = tuple[RowBatch, dict[int, Exception]]


class CallSerializer:
    """Turns records into rows and remembers what is stored already. Used by one thread at a time."""

    def __init__(self) -> None:
        self._codec = CellCodec()
        self._known = StoredKeys()
        self._last = ChainCache()
        self._engines: dict[EngineInfo, tuple[bytes, Row]] = {}
        self._clean_tools: dict[bytes, bytes] = {}

    def pack(self, records: Sequence[CallRecord]) -> SerializedCalls:
        """The rows of all records that can be stored, and by position why the others cannot."""
        batch = RowBatch()
        refused: dict[int, Exception] = {}
        for position, record in enumerate(records):
            try:
                self._add(batch, record)
            except (StoreError, TypeError, ValueError, RecursionError, OverflowError, AttributeError) as error:
                refused[position] = error
        return batch, refused

    def stored(self, batch: RowBatch) -> None:
        """The batch is committed: its content-addressed rows need not be offered again."""
        for key in (*batch.engines, *batch.settings, *batch.nodes):
            self._known.add(key)

    def forget(self) -> None:
        """Offer everything again (another process may have removed rows)."""
        self._known.forget_all()
        self._last.forget_all()

    def _add(self, batch: RowBatch, record: CallRecord) -> None:
        # All that can fail comes first: a refused record leaves nothing in the batch.
        last = self._last.get(record.session_id)
        messages, stored = message_chain(record.messages, last)
        tools = bytes_chain("tools", [self._tools(record.tools)] if record.tools is not None else [])
        prompt, before = self._prompt(record, last)
        asked = _asked(record, (*messages[:stored], *map(_link, messages[stored:])), prompt, before)
        prompt, tail = self._without_tail(prompt, before)
        prompt_head = prompt[-1] if prompt else before
        params, sampling = (_setting(json_without_secrets(value)) for value in (record.params, record.sampling))
        before_answer = bytes_before(record.messages) if record.choices else b""
        completions = [self._completion(record, choice, before_answer) for choice in record.choices]
        engine = self._engine(record.engine)

        for key, row in (params, sampling):
            if key not in self._known:
                batch.settings[key] = row
        if engine is not None and engine[0] not in self._known:
            batch.engines[engine[0]] = engine[1]
        for chain in (messages[stored:], tools, prompt):
            for node in chain:
                if node.id not in self._known and node.id not in batch.nodes:
                    batch.nodes[node.id] = (node.depth, node_row(node, self._codec, _before(node, record)))

        prompt_tokens = None if record.prompt_ids is None else int(record.prompt_ids.size)
        completion_tokens = sum(int(choice.token_ids.size) for choice in record.choices)
        batch.calls.append(
            {
                "call_id": record.call_id,
                "session_id": record.session_id,
                "dialect": record.dialect,
                "path": json_codec.clean_text(without_secrets(record.path)),
                "stream": record.stream,
                "model": json_codec.clean_text(record.model),
                "engine_hash": None if engine is None else engine[0],
                "weight_version": record.weight_version,
                "logprob_mode": record.logprob_mode,
                "status": record.status,
                "http_status": record.http_status,
                "error": None if record.error is None else json_codec.clean_text(without_secrets(record.error)),
                "edge": record.edge,
                "parent_call_id": record.parent_call_id,
                "rule": record.rule,
                "ambiguous": record.ambiguous,
                "thread": json_codec.clean_text(record.thread),
                "fingerprint": record.fingerprint,
                "prompt_mode": record.prompt_mode,
                "prompt_reason": record.prompt_reason,
                "base_call_id": record.base_call_id,
                "base_choice": record.base_choice,
                "message_count": len(messages),
                "messages_node": messages[-1].id if messages else None,
                "tools_node": tools[-1].id if tools else None,
                "params_hash": params[0],
                "sampling_hash": sampling[0],
                "prompt_node": prompt_head.id if prompt_head else None,
                "prompt_tail": tail,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "cached_tokens": record.cached_tokens,
                "started_at": record.started_at,
                "first_token_at": record.first_token_at,
                "ended_at": record.ended_at,
            }
        )
        batch.completions.extend(completions)
        self._last.put(record.session_id, asked)
        counts = batch.sessions.setdefault(record.session_id, SessionCounters())
        counts.calls += 1
        counts.failed += record.status != "ok"
        counts.prompt += prompt_tokens or 0
        counts.completion += completion_tokens
        counts.last = max(counts.last, record.ended_at)

    def _prompt(self, record: CallRecord, last: RequestChains | None) -> tuple[list[ChainNode], ChainNode | None]:
        if record.prompt_ids is None:
            return [], None
        _require_array(record.prompt_ids, np.int32, "prompt_ids")
        return prompt_chain(record.prompt_ids, _end_of_turn(record), last)

    def _tools(self, tools: bytes) -> bytes:
        """Without secrets. Agents send the same list with every call, so that looking through it is remembered."""
        if tools not in self._clean_tools:
            if len(self._clean_tools) >= _TOOL_LISTS:
                self._clean_tools.clear()
            self._clean_tools[tools] = bytes_without_secrets(tools)
        return self._clean_tools[tools]

    def _without_tail(self, prompt: list[ChainNode], before: ChainNode | None) -> tuple[list[ChainNode], bytes | None]:
        """What follows the last turn (the generation prompt) is of this call alone and a few tokens long: it goes with
        the call, since a row would cost ten times what it holds."""
        if not prompt or prompt[-1].length >= SHORTEST_TURN or (len(prompt) == 1 and before is None):
            return prompt, None
        content = prompt[-1].content
        assert not isinstance(content, bytes)
        return prompt[:-1], self._codec.pack_ids(content)

    def _completion(self, record: CallRecord, choice: Choice, before: bytes) -> Row:
        _require_array(choice.token_ids, np.int32, "token_ids")
        _require_array(choice.logprobs, np.float32, "logprobs")
        if choice.token_ids.size != choice.logprobs.size:
            raise StoreError(
                f"choice {choice.index} has {choice.token_ids.size} tokens and {choice.logprobs.size} log-probabilities"
            )
        return {
            "call_id": record.call_id,
            "choice_index": choice.index,
            "finish_reason": choice.finish_reason,
            "tokens": int(choice.token_ids.size),
            "message": self._codec.pack_bytes(json_codec.dumps(choice.message.to_openai()), before),
            "token_ids": self._codec.pack_ids(
                choice.token_ids, NO_IDS if record.prompt_ids is None else record.prompt_ids
            ),
            "logprobs": self._codec.pack_logprobs(choice.logprobs),
            "versions": [list(run) for run in choice.versions] or None,
        }

    def _engine(self, info: EngineInfo | None) -> tuple[bytes, Row] | None:
        if info is None:
            return None
        if info not in self._engines:
            self._engines[info] = engine_row(info)
        return self._engines[info]


def engine_row(info: EngineInfo) -> tuple[bytes, Row]:
    """(key, row) of an engine's description."""
    as_json = {**asdict(info), "capabilities": sorted(info.capabilities)}
    key = content_hash(json_codec.dumps(as_json))
    row: Row = {
        "engine_hash": key,
        "engine": info.engine,
        "version": info.version,
        "model": info.model,
        "info": as_json,
    }
    return key, row


def node_row(node: ChainNode, codec: CellCodec, before: bytes | TokenIds = b"") -> Row:
    """The row of one link of a chain. `before`: what its chain holds above it (messages: `bytes_before`; tokens: int32
    [total - length]), for it to be packed better; nothing, where that is not at hand."""
    content = node.content
    if isinstance(content, bytes):
        data = codec.pack_bytes(content, before if isinstance(before, bytes) else b"")
    else:
        data = codec.pack_ids(content, NO_IDS if isinstance(before, bytes) else before)
    return {
        "node_id": node.id,
        "parent_id": node.parent,
        "kind": node.kind,
        "length": node.length,
        "total": node.total,
        "data": data,
    }


def _before(node: ChainNode, record: CallRecord) -> bytes | TokenIds:
    if node.kind == "message":
        return bytes_before(record.messages[: node.depth])
    if node.kind == "tokens" and record.prompt_ids is not None:
        return record.prompt_ids[: node.total - node.length]
    return b""


def _end_of_turn(record: CallRecord) -> tuple[int, ...]:
    return record.engine.eos_token_ids if record.engine else ()


def _link(node: ChainNode) -> ChainNode:
    """The node without its content, to remember it by."""
    return ChainNode(node.id, node.parent, node.kind, node.depth, node.length, node.total, b"")


def _asked(
    record: CallRecord, links: tuple[ChainNode, ...], prompt: list[ChainNode], before: ChainNode | None
) -> RequestChains:
    # The last segment ends where the prompt ends, which is no place to cut a longer one.
    link = prompt[-2] if len(prompt) > 1 else before
    ids = record.prompt_ids
    return RequestChains(
        messages=record.messages,
        message_links=links,
        end_of_turn=_end_of_turn(record),
        prompt=ids[: link.total].copy() if ids is not None and link is not None else np.empty(0, np.int32),
        prompt_link=None if link is None else _link(link),
    )


def _setting(value: Json) -> tuple[bytes, Row]:
    key = content_hash(json_codec.dumps(value))
    return key, {"settings_hash": key, "value": value}


def _require_array(array: object, dtype: type[np.generic], name: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        raise StoreError(f"{name} must be a {dtype.__name__} array of one dimension")
