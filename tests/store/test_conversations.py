"""Conversations in the store."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from polar_proxy.store import Store
from polar_proxy.types import ConversationItem, ConversationTurn
from tests.factories import call_record, new_session

pytestmark = pytest.mark.slow


def items(*names: str) -> list[ConversationItem]:
    """Return items with a character that JSON has to escape. The client got the last one in another form."""
    found = [ConversationItem(name, {"role": "user", "content": f"{name} \ud800"}) for name in names]
    return [*found[:-1], replace(found[-1], shown={"content": "x"})]


async def test_items_are_read_in_the_order_of_their_addition(store: Store) -> None:
    own = (await store.conversations.create(await new_session(store), {}, items("a", "b"))).conversation_id
    await store.conversations.add(own, items("c"))
    assert await store.conversations.items(own) == [*items("a", "b"), *items("c")]
    page = await store.conversations.page(own, 2, "desc", None)
    assert page == ([*items("c"), *items("b")], True)
    assert await store.conversations.page(own, 2, "desc", "b") == (items("a", "b")[:1], False)
    assert await store.conversations.page(own, 2, "asc", "a") == ([*items("b"), *items("c")], False)
    assert await store.conversations.page(own, 2, "asc", "x") is None
    await store.conversations.delete_item(own, "b")
    assert await store.conversations.item_ids(own) == {"a", "c"}


async def test_a_call_adds_its_items_with_its_commit(store: Store) -> None:
    session = await new_session(store)
    own = (await store.conversations.create(session, {}, [])).conversation_id
    record = call_record(session, conversation=ConversationTurn(own, tuple(items("a", "b"))))
    await store.calls.commit(record)
    assert await store.conversations.items(own) == items("a", "b")
    found = await store.calls.get(record.call_id)
    assert found is not None
    assert found.conversation is None


async def test_a_call_of_a_deleted_conversation_is_committed(store: Store) -> None:
    session = await new_session(store)
    kept, gone = [(await store.conversations.create(session, {}, [])).conversation_id for _ in range(2)]
    await store.conversations.delete(gone)
    records = [call_record(session, conversation=ConversationTurn(name, tuple(items("a")))) for name in (kept, gone)]
    await asyncio.gather(*(store.calls.commit(record) for record in records))
    assert (await store.conversations.size_of_session(session)).items == 1
    assert len(await store.calls.of_session(session)) == 2


async def test_what_calls_add_at_the_same_time_is_not_mixed(store: Store) -> None:
    session = await new_session(store)
    own = (await store.conversations.create(session, {}, [])).conversation_id
    turns = [items(*(f"{number}-{position}" for position in range(3))) for number in range(20)]
    records = [call_record(session, conversation=ConversationTurn(own, tuple(turn))) for turn in turns]
    await asyncio.gather(*(store.calls.commit(record, large=number % 2 == 0) for number, record in enumerate(records)))
    found = [item.item_id for item in await store.conversations.items(own)]
    assert [found[start : start + 3] for start in range(0, 60, 3)] == [
        [f"{name.partition('-')[0]}-{position}" for position in range(3)] for name in found[::3]
    ]


async def test_conversations_are_pruned_with_their_session(store: Store) -> None:
    session = await new_session(store)
    await store.calls.commit(call_record(session))
    await store.conversations.create(session, {"key": "sk-abcdefghijklmnop1234"}, items("a"))
    await store.sessions.close(session)
    await store.maintenance.prune(before=1e11)
    rows = (await store.maintenance.stats())["rows"]
    assert (rows["sessions"], rows["conversations"], rows["conversation_items"]) == (0, 0, 0)


async def test_metadata_has_no_secrets(store: Store) -> None:
    session = await new_session(store)
    made = await store.conversations.create(session, {"key": "sk-abcdefghijklmnop1234"}, [])
    assert made.metadata == {"key": "[secret removed]"}
    assert await store.conversations.get(session, made.conversation_id) == made
    assert await store.conversations.get("other", made.conversation_id) is None
