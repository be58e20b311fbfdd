"""Records are found by id, the beginning of an id, label, and `last`."""

from __future__ import annotations

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.store.repositories.names import UnknownNameError
from tests.factories import call_record, new_rollout, new_session


async def test_finds_records_by_id_and_by_the_beginning_of_an_id(store: Store) -> None:
    session_id = await new_session(store)
    rollout_id = await new_rollout(store, session_id)
    call = call_record(session_id)
    await store.calls.commit(call)
    for record_id, kind in ((session_id, "session"), (rollout_id, "rollout"), (call.call_id, "call")):
        for name in (record_id, record_id[:-1], record_id[:12], record_id[:5], record_id[:2]):
            found = await store.names.find(name)
            assert (found.kind, found.record_id) == (kind, record_id), name


async def test_finds_sessions_by_label_and_the_beginning_of_one(store: Store) -> None:
    mine = await new_session(store, label="nightly")
    other = await new_session(store, label="nightly-2")
    assert (await store.names.find("nightly")).record_id == mine
    assert (await store.names.find("nightly-")).record_id == other


async def test_last_is_the_session_that_was_used_last(store: Store) -> None:
    used, unused = await new_session(store), await new_session(store)
    assert (await store.names.find("last")).record_id == unused
    await store.calls.commit(call_record(used, ended_at=4_000_000_000.0))
    assert (await store.names.find("last")).record_id == used


async def test_an_ambiguous_name_lists_the_candidates(store: Store) -> None:
    made = [await new_session(store, label=f"run {number}") for number in range(7)]
    for name in ("sess_", "run"):
        with pytest.raises(UsageError, match="several names") as raised:
            await store.names.find(name)
        assert f"{made[-1]}" in str(raised.value)
        assert str(raised.value).endswith("\n...")
    twice = [await new_session(store, label="same"), await new_session(store, label="same")]
    with pytest.raises(UsageError, match=twice[0]):
        await store.names.find("same")


@pytest.mark.parametrize("name", ["sess_zzzz", "roll_zz", "nothing", "", "%", "sess%", "_", "last"])
async def test_rejects_unknown_names(store: Store, name: str) -> None:
    if name != "last":
        await new_session(store, label="mine")
    with pytest.raises(UnknownNameError, match="polar sessions"):
        await store.names.find(name)
