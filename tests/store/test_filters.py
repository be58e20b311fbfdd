"""Conditions on rollouts: what is accepted, and that hostile text costs nothing."""

from __future__ import annotations

import time

import pytest

from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.store.filters import parse_where
from tests.factories import new_rollout, new_session


@pytest.mark.parametrize(
    ("text", "conditions"),
    [("", 0), (" , and ,", 0), ("reward >= 1 , harness = codex", 2), ("seed=1 and status!=done", 2)],
)
def test_reads_conditions(text: str, conditions: int) -> None:
    assert len(parse_where(text)) == conditions


@pytest.mark.parametrize("text", ["reward", "reward >", "=1", "reward ~ 1", "x" * 4000, "reward" + " " * 4000 + "1"])
def test_rejects_what_is_no_condition_at_once(text: str) -> None:
    start = time.process_time()
    with pytest.raises(UsageError, match="is not a condition"):
        parse_where(text)
    assert time.process_time() - start < 0.5


def test_rejects_very_long_text() -> None:
    with pytest.raises(UsageError, match="at most 4096"):
        parse_where("reward=1" + " " * 60_000 + "and reward=1")


async def matching(store: Store, where: str) -> list[str]:
    return [row.harness for row in await store.rollouts.find(where=where)]


async def test_the_name_of_a_harness_matches_all_its_versions(store: Store) -> None:
    for harness in ("codex", "codex 1.2.3", "codex-next", "codex_ 1", "pi"):
        await new_rollout(store, harness=harness)
    assert await matching(store, "harness=codex") == ["codex", "codex 1.2.3"]
    assert await matching(store, "harness=codex@1.2.3") == ["codex 1.2.3"]
    assert await matching(store, "harness=codex 1.2.3") == ["codex 1.2.3"]
    assert await matching(store, "harness!=codex") == ["codex-next", "codex_ 1", "pi"]
    assert await matching(store, "harness=code%") == []


async def test_conditions_without_a_match_list_existing_values(store: Store) -> None:
    assert await store.rollouts.explain_no_match("reward>=1") == "The database has no rollouts."
    session_id = await new_session(store)
    first = await new_rollout(store, session_id, harness="codex 1")
    await new_rollout(store, harness="pi")
    explain = store.rollouts.explain_no_match
    assert "Values of harness: codex 1 (1), pi (1)." in await explain("harness=cody")
    assert "Values of status: preparing (1), queued (1)." in await explain("status=done")
    assert "No rollout has a reward." in await explain("reward>=1")
    await store.rewards.add(first, 0.5, "tests", {})
    assert "Values of reward: 0.5 to 0.5." in await explain("reward>=1")
    assert "Values of family: swe-task (2)." in await explain("family=other")
    assert "Values of cause: none (2)." in await explain("cause=oom")
    assert "harness=pi matches 1 of 2 rollouts." in await explain("harness=pi, status=done")
    for number in range(10):
        await new_rollout(store, harness=f"agent-{number}")
    assert (await explain("harness=cody")).endswith("and others.")
