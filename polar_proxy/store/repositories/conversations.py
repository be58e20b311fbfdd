"""Conversations of the Responses API. Polar keeps the items of a conversation, and each call may add items.

The items that a call adds are written in the transaction that commits the call. So a conversation has every answer that
its client got, and no answer that is not recorded.

Promises:

* Items are in the order in which they were added. The items of one call are not mixed with the items of another,
  because each transaction locks the conversations that it adds to.
* If a conversation was deleted while a call was answered, the call is committed and adds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from polar_proxy.store import json_codec, schema
from polar_proxy.store.database import Repository, row_columns
from polar_proxy.store.encoding.packed_json import pack_small_json, unpack_small_json
from polar_proxy.store.secrets import json_without_secrets
from polar_proxy.types import ConversationItem, Json, new_id

_c = schema.conversations.c
_i = schema.conversation_items.c
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class ConversationRow:
    conversation_id: str
    session_id: str
    metadata: Json
    created_at: float
    """Seconds since the epoch."""
    at_provider: bool = False
    """True if the provider keeps the conversation. Then only the items with which it was created are stored here."""


class ConversationSize(NamedTuple):
    """The size of one conversation, or of all conversations of a session."""

    conversations: int
    items: int
    bytes: int


class ItemPage(NamedTuple):
    items: list[ConversationItem]
    has_more: bool


_columns = row_columns(ConversationRow, schema.conversations)
_sizes = select(
    func.count(_c.conversation_id.distinct()), func.count(_i.position), func.coalesce(func.sum(_i.length), 0)
).select_from(schema.conversations.outerjoin(schema.conversation_items, _i.conversation_id == _c.conversation_id))
_items = select(_i.item_id, _i.item, _i.shown)
_insert_conversation = insert(schema.conversations)


def item_row(conversation_id: str, item: ConversationItem) -> dict[str, object]:
    """Return the row of an item. Its JSON is stored unchanged, as the messages of calls are."""
    content = json_codec.dumps(item.item)
    shown = None if item.shown is None else json_codec.dumps(item.shown)
    return {
        "conversation_id": conversation_id,
        "item_id": json_codec.clean_text(item.item_id),
        "length": len(content) + len(shown or b""),
        "item": pack_small_json(content),
        "shown": None if shown is None else pack_small_json(shown),
    }


def append_items(connection: Connection, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert rows that `item_row` returned. Rows of conversations that do not exist any more are left out."""
    if not rows:
        return
    ids = {row["conversation_id"] for row in rows}
    # Locked in the order of their ids, so that two gateways cannot deadlock.
    query = select(_c.conversation_id).where(_c.conversation_id.in_(ids)).order_by(_c.conversation_id)
    existing = set(connection.scalars(query.with_for_update()))
    if kept := [row for row in rows if row["conversation_id"] in existing]:
        connection.execute(insert(schema.conversation_items), kept)


class ConversationRepository(Repository):
    """Conversations of the Responses API and their items."""

    async def create(
        self, session_id: str, metadata: Json, items: Sequence[ConversationItem], *, provider_id: str | None = None
    ) -> ConversationRow:
        """Store a new conversation. `provider_id`: the id of the conversation at its provider, if the provider keeps
        it."""
        identity, at_provider = provider_id or new_id("conv"), provider_id is not None
        row = ConversationRow(identity, session_id, json_without_secrets(metadata), time.time(), at_provider)
        values = {column.name: getattr(row, column.name) for column in _c}
        item_rows = [item_row(row.conversation_id, item) for item in items]

        def write(connection: Connection) -> None:
            connection.execute(_insert_conversation, values)
            append_items(connection, item_rows)

        await self._database.write(write)
        return row

    async def get(self, session_id: str, conversation_id: str, *, at_provider: bool = False) -> ConversationRow | None:
        """Return a conversation of this session; None if there is none with this id.

        Find only conversations that the provider keeps (`at_provider`), or only those that Polar keeps (the default).
        """
        mine = (_c.conversation_id == conversation_id, _c.session_id == session_id, _c.at_provider == at_provider)
        return await self._row(ConversationRow, select(*_columns).where(*mine))

    async def set_metadata(self, conversation_id: str, metadata: Json) -> None:
        mine = _c.conversation_id == conversation_id
        values = {"metadata": json_without_secrets(metadata)}
        await self._write(update(schema.conversations).where(mine).values(values))

    async def delete(self, conversation_id: str) -> None:
        """Delete a conversation and its items. The calls that added them stay. Idempotent."""
        await self._write(delete(schema.conversations).where(_c.conversation_id == conversation_id))

    async def size(self, conversation_id: str) -> ConversationSize:
        return await self._size(_sizes.where(_c.conversation_id == conversation_id))

    async def size_of_session(self, session_id: str) -> ConversationSize:
        return await self._size(_sizes.where(_c.session_id == session_id))

    async def _size(self, query: Select[Any]) -> ConversationSize:
        conversations, items, size = await self._database.read(lambda connection: connection.execute(query).one())
        return ConversationSize(conversations, items, int(size))

    async def add(self, conversation_id: str, items: Sequence[ConversationItem]) -> None:
        rows = [item_row(conversation_id, item) for item in items]
        await self._database.write(lambda connection: append_items(connection, rows))

    async def items(self, conversation_id: str) -> list[ConversationItem]:
        """Return all items in order."""
        return await self._read(_items.where(_i.conversation_id == conversation_id).order_by(_i.position))

    async def item_ids(self, conversation_id: str) -> set[str]:
        return set(await self._scalars(select(_i.item_id).where(_i.conversation_id == conversation_id)))

    async def item(self, conversation_id: str, item_id: str) -> ConversationItem | None:
        mine = (_i.conversation_id == conversation_id, _i.item_id == item_id)
        found = await self._read(_items.where(*mine).order_by(_i.position).limit(1))
        return found[0] if found else None

    async def page(self, conversation_id: str, limit: int, order: Order, after: str | None) -> ItemPage | None:
        """Return up to `limit` items: the first ones or, if `after` is given, those that follow the item with this id.
        Return None if no item has this id."""
        query = _items.where(_i.conversation_id == conversation_id)
        query = query.order_by(_i.position.asc() if order == "asc" else _i.position.desc())
        if after is not None:
            mine = select(_i.position).where(_i.conversation_id == conversation_id, _i.item_id == after)
            positions = await self._scalars(mine.order_by(_i.position).limit(1))
            if not positions:
                return None
            query = query.where(_i.position > positions[0] if order == "asc" else _i.position < positions[0])
        found = await self._read(query.limit(limit + 1))
        return ItemPage(found[:limit], len(found) > limit)

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        mine = (_i.conversation_id == conversation_id, _i.item_id == item_id)
        await self._write(delete(schema.conversation_items).where(*mine))

    async def _read(self, query: Select[Any]) -> list[ConversationItem]:
        return await self._database.read(lambda connection: [_read_item(row) for row in connection.execute(query)])


def _read_item(row: Row[Any]) -> ConversationItem:
    return ConversationItem(row.item_id, _unpack(row.item), None if row.shown is None else _unpack(row.shown))


def _unpack(cell: bytes) -> Json:
    item: Json = json_codec.loads(unpack_small_json(cell))
    return item
