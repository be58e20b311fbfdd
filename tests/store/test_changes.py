"""The state of records differs after each change of what their page shows, on each database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

from polar_proxy.store import Store
from polar_proxy.store.repositories.changes import Followed
from tests.factories import call_record, new_session
from tests.view.recorded import running_rollout


async def test_a_change_is_seen_in_the_states_of_the_records_that_it_concerns(store: Store) -> None:
    rollout_id, session_id = await running_rollout(store, "run")
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    await store.training.put_run("run_1", "first", {}, [])
    other = await new_session(store)
    named = {"rollout": rollout_id, "session": session_id, "group": row.group_id, "training": "run_1"}

    async def states() -> dict[Followed, int]:
        return {kind: await store.changes.state(kind, named.get(kind, "")) for kind in get_args(Followed)}

    async def changed_by(change: Callable[[], Awaitable[Any]]) -> set[Followed]:
        before = await states()
        await change()
        after = await states()
        return {kind for kind in after if after[kind] != before[kind]}

    run: set[Followed] = {"lists", "rollout", "group"}
    assert await states() == await states()
    assert await changed_by(lambda: store.calls.commit(call_record(session_id))) == run | {"session"}
    assert await changed_by(lambda: store.calls.commit(call_record(other))) == {"lists"}
    assert await changed_by(lambda: new_session(store)) == {"lists"}
    assert await changed_by(lambda: store.rollouts.update(rollout_id, status="done")) == run
    assert await changed_by(lambda: store.rewards.add(rollout_id, 1.0, "person", {})) == run
    assert await changed_by(lambda: store.remarks.add("label", "anna", rollout_id=rollout_id, text="odd")) == run
    step = {"kind": "step", "step": 1, "at": 1.0}
    assert await changed_by(lambda: store.training.add_lines("run_1", 0, [step])) == {"lists", "training"}
