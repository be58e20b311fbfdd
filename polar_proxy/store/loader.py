"""Calls read back: rows and chains to records, equal to what was committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import CTE, ColumnElement, CompoundSelect, Select, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from polar_proxy.errors import StoreError
from polar_proxy.store import json_codec
from polar_proxy.store.buffers import TextPrefix, TokenPrefix
from polar_proxy.store.codec import CellCodec, ids_of
from polar_proxy.store.schema import calls, completions, engines, nodes, settings
from polar_proxy.types import CallRecord, Choice, EngineInfo, Json, Logprobs, Message, TokenIds

_c = calls.c
_AS_THEY_ARE = (
    *("call_id", "session_id", "dialect", "path", "stream", "model", "weight_version", "logprob_mode", "status"),
    *("http_status", "error", "edge", "parent_call_id", "rule", "ambiguous", "thread", "prompt_mode", "prompt_reason"),
    *("base_call_id", "base_choice", "started_at", "first_token_at", "ended_at", "cached_tokens"),
)
"""Fields of a record that are columns of `calls` under the same names."""
_TO_UNPACK = ("engine_hash", "params_hash", "sampling_hash", "prompt_node", "prompt_tail", "prompt_tokens")
_WITH_TEXT = ("fingerprint", "message_count", "messages_node", "tools_node", "completion_tokens")


async def fetch(connection: AsyncConnection, where: ColumnElement[bool], *, text: bool = True) -> CallLoader:
    """All rows behind the calls that fulfil `where` (a condition on `calls`): five statements, each node once.

    Without `text` the records have tokens, but no messages, tools or fingerprint, and their answers are empty.
    """
    names = (*_AS_THEY_ARE, *_TO_UNPACK, *(_WITH_TEXT if text else ()))
    query = select(*(_c[name] for name in names)).where(where).order_by(_c.started_at, _c.call_id)
    rows = (await connection.execute(query)).all()
    if not rows:
        return CallLoader((), (), ())
    answers = [column for column in completions.c if text or column.name != "message"]
    chosen = (
        await connection.execute(
            select(*answers)
            .join(calls, _c.call_id == completions.c.call_id)
            .where(where)
            .order_by(completions.c.call_id, completions.c.choice_index)
        )
    ).all()
    used = union(*(select(column).where(where) for column in (_c.params_hash, _c.sampling_hash))).subquery()
    asked = select(settings).join(used, used.c[0] == settings.c.settings_hash)
    told = select(engines.c.engine_hash, engines.c.info).where(
        engines.c.engine_hash.in_(select(_c.engine_hash).where(where))
    )
    common = SharedRows(
        {bytes(row.settings_hash): row.value for row in await connection.execute(asked)},
        {bytes(row.engine_hash): row.info for row in await connection.execute(told)},
    )
    columns = (_c.prompt_node, *((_c.messages_node, _c.tools_node) if text else ()))
    heads = union(*(select(column.label("node_id")).where(where, column.is_not(None)) for column in columns))
    return CallLoader(rows, chosen, await fetch_links(connection, heads), common, text=text)


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


@dataclass(frozen=True, slots=True)
class SharedRows:
    """What many calls have in common, by its hash. Their records share it: nobody writes into it."""

    settings: Mapping[bytes, Json] = field(default_factory=dict)
    engines: Mapping[bytes, Json] = field(default_factory=dict)


class CallLoader:
    """What `fetch` found. Unpacking is CPU work without the database: do it in a thread when there is much."""

    def __init__(
        self,
        rows: Sequence[Any],
        chosen: Sequence[Any],
        links: Sequence[Any],
        common: SharedRows = SharedRows(),
        *,
        text: bool = True,
    ) -> None:
        self._text = text
        self._common = common
        self._rows = rows
        self._chosen = chosen
        self._codec = CellCodec()
        self._links = {bytes(link.node_id): link for link in links}
        self._bytes: dict[bytes, bytes] = {}
        self._texts: dict[bytes | None, TextPrefix] = {None: TextPrefix.none()}
        self._conversations: dict[bytes | None, tuple[bytes, ...]] = {None: ()}
        self._prompts: dict[bytes | None, TokenPrefix] = {None: TokenPrefix.none()}
        self._infos: dict[bytes, EngineInfo] = {}
        self._tails: dict[bytes, tuple[bytes, int]] = {}

    def records(self) -> list[CallRecord]:
        chosen: dict[str, list[Any]] = defaultdict(list)
        for row in self._chosen:
            chosen[row.call_id].append(row)
        return self._records([(row, chosen[row.call_id]) for row in self._rows])

    def _records(self, rows: Sequence[tuple[Any, Sequence[Any]]]) -> list[CallRecord]:
        """Of calls with their answers. All tokens are read before the first array is made: so there are few arrays."""
        prompts = [
            None if row.prompt_tokens is None else self._prompt(row.prompt_node, row.prompt_tail) for row, _ in rows
        ]
        answers = [
            (answer, prompt or TokenPrefix.none())
            for (_, chosen), prompt in zip(rows, prompts, strict=True)
            for answer in chosen
        ]
        said = zip(self._token_ids(answers), self._logprobs([answer for answer, _ in answers]), strict=True)
        return [self._record(row, chosen, prompt, said) for (row, chosen), prompt in zip(rows, prompts, strict=True)]

    def _token_ids(self, answers: Sequence[tuple[Any, TokenPrefix]]) -> Iterator[TokenIds]:
        """Of answers behind their prompts, in the same order."""
        bodies: dict[int, list[bytes]] = defaultdict(list)
        widths = []
        for answer, prompt in answers:
            body, width = self._codec.unpack_ids_bytes(answer.token_ids, prompt)
            bodies[width].append(body)
            widths.append(width)
        arrays = {width: iter(ids_of(found, width)) for width, found in bodies.items()}
        return (next(arrays[width]) for width in widths)

    def _logprobs(self, answers: Sequence[Any]) -> Sequence[Logprobs]:
        return self._codec.unpack_all_logprobs([answer.logprobs for answer in answers])

    def _record(
        self,
        row: Any,
        chosen: Sequence[Any],
        prompt: TokenPrefix | None,
        said: Iterator[tuple[TokenIds, Logprobs]],
    ) -> CallRecord:
        """`said`: of what is sampled, what comes next."""
        if self._text:
            messages = self._messages(row.messages_node, row.message_count)
            tools = None if row.tools_node is None else self._content(row.tools_node, TextPrefix.none())
            before, fingerprint = self._texts[row.messages_node], row.fingerprint
        else:
            messages, tools, before, fingerprint = (), None, TextPrefix.none(), None
        choices = tuple(
            Choice(
                index=answer.choice_index,
                message=self._message(answer.message, before.end) if self._text else Message("assistant"),
                finish_reason=answer.finish_reason,
                token_ids=token_ids,
                logprobs=logprobs,
                versions=tuple((start, version) for start, version in answer.versions or ()),
            )
            for answer, (token_ids, logprobs) in zip(chosen, said, strict=False)
        )
        return CallRecord(
            **dict(zip(_AS_THEY_ARE, row, strict=False)),
            engine=None if row.engine_hash is None else self._engine(row.engine_hash),
            fingerprint=fingerprint,
            messages=messages,
            tools=tools,
            params=_known(self._common.settings, row.params_hash),
            sampling=_known(self._common.settings, row.sampling_hash),
            prompt_ids=None if prompt is None else prompt.ids,
            choices=choices,
        )

    def _engine(self, key: bytes) -> EngineInfo:
        if key not in self._infos:
            self._infos[key] = engine_info(_known(self._common.engines, key))
        return self._infos[key]

    def _message(self, cell: bytes, before: bytearray) -> Message:
        return Message.from_openai(json_codec.loads(self._codec.unpack_bytes(cell, before)))

    def _messages(self, head: bytes | None, count: int) -> tuple[bytes, ...]:
        new: list[bytes] = []
        node = head
        while node is not None and node not in self._conversations:
            new.append(node)
            node = self._link(node).parent_id
        found, text = list(self._conversations[node]), self._texts[node]
        for node in reversed(new):
            content = self._content(node, text)
            found.append(content)
            text = text.and_then(content)
        self._texts[head] = text
        if len(found) != count:
            raise StoreError(f"A conversation of {count} messages has {len(found)} stored: the database is damaged")
        messages = self._conversations[head] = tuple(found)
        return messages

    def _link(self, node: bytes) -> Any:
        if node not in self._links:
            raise StoreError(f"The node {node.hex()} of a stored chain is missing: the database is damaged")
        return self._links[node]

    def _content(self, node: bytes, above: TextPrefix) -> bytes:
        if node not in self._bytes:
            self._bytes[node] = self._codec.unpack_bytes(self._link(node).data, above.end)
        return self._bytes[node]

    def prompt(self, head: bytes | None) -> TokenIds:
        """The prompt whose chain ends at `head`. Read-only; prompts that begin alike share their memory."""
        return self._prompt(head, None).ids

    def _prompt(self, head: bytes | None, tail: bytes | None) -> TokenPrefix:
        """With the packed tokens that come behind it."""
        new: list[bytes] = []
        node = head
        while node is not None and node not in self._prompts:
            new.append(node)
            node = self._link(node).parent_id
        prompt = self._prompts[node]
        for node in reversed(new):
            link = self._link(node)
            prompt = prompt.and_then(*self._codec.unpack_ids_bytes(link.data, prompt))
            if prompt.size != link.total:
                raise StoreError("A prompt has not as many tokens as its chain counts: the database is damaged")
            self._prompts[node] = prompt
        if tail is None:
            return prompt
        if tail not in self._tails:  # the same opening of an answer, as a rule
            self._tails[tail] = self._codec.unpack_ids_bytes(tail)
        return prompt.and_then(*self._tails[tail])


def _known(common: Mapping[bytes, Json], key: bytes) -> Json:
    if key not in common:
        raise StoreError(f"The row {bytes(key).hex()} that a call refers to is missing: the database is damaged")
    return common[key]


def engine_info(info: Json) -> EngineInfo:
    """An engine's description, as it was before it was stored."""
    return EngineInfo(
        **{
            **info,
            "capabilities": frozenset(info["capabilities"]),
            "eos_token_ids": tuple(info.get("eos_token_ids", ())),
        }
    )
