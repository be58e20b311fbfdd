"""Groups and comparisons: messages side by side, the first difference, shared tokens, and what is trained."""

from __future__ import annotations

import re

import httpx
import numpy as np
import orjson
import pytest
from sqlalchemy import insert

from polar_proxy.store import Store, schema
from polar_proxy.store.repositories.calls import CallRepository
from polar_proxy.store.service.jobs import NewGroup
from polar_proxy.traces.operations import build_traces, find_targets, rebuild
from polar_proxy.training.batch import make_batch
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.feed import StoreGroupReader
from polar_proxy.types import CallRecord, Message
from polar_proxy.view.alignment import RunMessage, align, main_call, read_messages, shared_tokens
from polar_proxy.view.token_source import group_advantages
from tests.factories import ROLLOUT, call_record, new_rollout
from tests.training.group_factories import rollout
from tests.view import recorded
from tests.view.recorded_groups import short_group, train_group


def messages(*texts: str) -> list[RunMessage]:
    return [RunMessage("user" if index % 2 == 0 else "assistant", text) for index, text in enumerate(texts)]


def test_the_reward_of_an_incomplete_rollout_counts_in_the_baseline_as_in_training() -> None:
    finished = [rollout(0, 1.0), rollout(1, 0.0, incomplete=True), rollout(2, None, status="failed")]
    found = group_advantages([*finished, rollout(3, None, status="running")])
    assert found["roll_0"] == pytest.approx(0.5**0.5, abs=1e-4)
    assert found == {"roll_0": found["roll_0"], "roll_1": -(found["roll_0"] or 0), "roll_2": None}


def test_runs_share_their_first_messages_and_part_at_a_word() -> None:
    found = align([messages("fix it", "I read mean.py now", "ok"), messages("fix it", "I read test.py now")])
    assert [cell.rest for cell in found.shared] == ["fix it"]
    first, second = found.rows[0]
    assert first is not None
    assert second is not None
    assert (first.same, first.different, first.rest) == ("I read ", "mean.py", " now")
    assert (second.same, second.different, second.rest) == ("I read ", "test.py", " now")
    assert [None if cell is None else cell.rest for cell in found.rows[1]] == ["ok", None]


def test_a_run_that_ends_early_shares_all_its_messages() -> None:
    found = align([messages("a", "b"), messages("a", "b", "c")])
    assert len(found.shared) == 2
    assert [None if cell is None else cell.different for cell in found.rows[0]] == [None, "c"]


def test_a_long_message_is_shown_around_its_first_difference() -> None:
    same = "x " * 5000
    found = align([messages(same + "left end"), messages(same + "right end")])
    cell = found.rows[0][0]
    assert cell is not None
    assert cell.different == "left"
    assert len(cell.same) == 400
    assert cell.is_cut


@pytest.mark.parametrize(
    ("sequences", "shared"), [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2], [1, 2, 3]], 2), ([[5], [6]], 0), ([[7, 8]], 2)]
)
def test_shared_tokens_end_at_the_first_difference(sequences: list[list[int]], shared: int) -> None:
    assert shared_tokens([np.array(ids, np.int32) for ids in sequences]) == shared


def test_blank_lines_around_reasoning_and_text_are_not_shown() -> None:
    answer = {"role": "assistant", "content": "\n\n", "reasoning_content": "\nI read\n\nmean.py.\n"}
    call = call_record("sess_1", messages=(orjson.dumps(answer),), tools=None, choices=())
    assert read_messages(call) == [RunMessage("assistant", "I read\n\nmean.py.")]


async def test_the_main_call_is_not_one_of_a_subagent(store: Store) -> None:
    session_id = await recorded.branching_session(store)
    call = main_call(await store.calls.summaries(session_id))
    assert call is not None
    assert call.edge not in ("subagent", "side_call")


async def finished_rollout(store: Store, answer: str, reward: float) -> str:
    rollout_id, session_id = await recorded.running_rollout(store, answer)
    call = call_record(session_id)
    choice = call.choices[0]
    changed = type(choice)(
        0, Message("assistant", answer), "stop", np.append(choice.token_ids, len(answer)).astype(np.int32),
        np.append(choice.logprobs, -0.5).astype(np.float32),
    )  # fmt: skip
    await recorded.commit(store, type(call)(**{**{n: getattr(call, n) for n in call.__slots__}, "choices": (changed,)}))
    await build_traces(store, session_id, rollout_id, reward=reward, incomplete=False)
    await store.rewards.add(rollout_id, reward, "test", {})
    await store.rollouts.update(rollout_id, status="done")
    return rollout_id


async def test_two_rollouts_are_compared(pages: httpx.AsyncClient, store: Store) -> None:
    first = await finished_rollout(store, "I changed mean.py", 1.0)
    second = await finished_rollout(store, "I gave up entirely", 0.0)
    page = (await pages.get("/view/compare", params={"run": [first, second]})).text
    assert "<mark>changed</mark> mean.py" in page
    assert "<mark>gave</mark> up entirely" in page
    row = await store.rollouts.get(first)
    assert row is not None
    (trace,) = await store.traces.find(session_id=row.session_id)
    position = len(trace.token_ids) - 1
    assert f"/view/traces/{trace.trace_id}#{position}" in page


async def test_hostile_texts_are_compared_as_text(pages: httpx.AsyncClient, store: Store) -> None:
    hostile, _ = await recorded.hostile_rollout(store)
    other = await finished_rollout(store, "fine", 1.0)
    page = (await pages.get("/view/compare", params={"run": [hostile, other]})).text
    assert "<script>document" not in page
    assert "&lt;script&gt;document" in page


async def test_an_unknown_rollout_is_named(pages: httpx.AsyncClient) -> None:
    answer = await pages.get("/view/compare", params={"run": ["roll_x", "roll_y"]})
    assert answer.status_code in (400, 404)
    assert "roll_x" in answer.text


async def test_a_group_shows_what_is_trained(pages: httpx.AsyncClient, store: Store) -> None:
    rollout_id = await finished_rollout(store, "alone", 1.0)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    page = (await pages.get(f"/view/groups/{row.group_id}")).text
    assert f"/view/parts/groups/{row.group_id}/training" in page
    part = (await pages.get(f"/view/parts/groups/{row.group_id}/training")).text
    assert "no spread" in part


async def test_the_counts_of_a_group_are_those_of_the_trainer(pages: httpx.AsyncClient, store: Store) -> None:
    group = await short_group(store)
    await train_group(store, group.group_id)
    read = await StoreGroupReader(store).read_group(group.group_id, "merged", None)
    batch = make_batch([read], GrpoConfig())
    assert batch.plan.trained_tokens > 0
    part = (await pages.get(f"/view/parts/groups/{group.group_id}/training")).text
    for name, value in (("sampled tokens", batch.plan.sampled_tokens), ("trained tokens", batch.plan.trained_tokens)):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in part
    assert f"{batch.plan.trained_rollouts} of 3" in part
    assert re.search(r'<a href="/view/training/run_first">first</a> in step 1\.', part)


@pytest.mark.parametrize("is_stored", [True, False])
async def test_a_group_of_another_builder_reads_all_calls_once_at_most(
    pages: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    group = await short_group(store)
    await train_group(store, group.group_id)
    await store.training.put_run("run_first", "first", GrpoConfig(builder="tree").to_json(), [])
    batch = make_batch([await StoreGroupReader(store).read_group(group.group_id, "tree", None)], GrpoConfig())
    if is_stored:
        await rebuild(store, await find_targets(store), builder="tree")
    read = CallRepository.of_session
    sessions: list[str] = []

    async def counted(self: CallRepository, session_id: str, *, text: bool = True) -> list[CallRecord]:
        sessions.append(session_id)
        return await read(self, session_id, text=text)

    monkeypatch.setattr(CallRepository, "of_session", counted)
    for _ in range(2):
        part = (await pages.get(f"/view/parts/groups/{group.group_id}/training")).text
        assert f"<dt>trained tokens</dt><dd>{batch.plan.trained_tokens}</dd>" in part
        assert "<dd>tree</dd>" in part
        assert len(sessions) == (0 if is_stored else 3)


async def test_a_repetition_links_to_the_comparison_with_its_original(pages: httpx.AsyncClient, store: Store) -> None:
    original = await new_rollout(store)
    group = NewGroup("task-1", 1, {}, (ROLLOUT,))
    job, _ = await store.jobs.submit({"repeat_of": original}, [group], owned=True)
    (row,) = await store.rollouts.find(job_id=job.job_id)
    page = (await pages.get(f"/view/rollouts/{row.rollout_id}")).text
    assert f'href="/view/compare?run={original}&amp;run={row.rollout_id}"' in page
    assert "compare with the original" not in (await pages.get(f"/view/rollouts/{original}")).text


async def test_a_run_of_another_trainer_shows_the_default_settings(pages: httpx.AsyncClient, store: Store) -> None:
    rollout_id = await finished_rollout(store, "alone", 1.0)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    await store.training.put_run(
        "run_1", "foreign", {"nothing": 1}, [{"kind": "step", "step": 1, "at": 0.0, "groups": 7}]
    )
    lease = insert(schema.leases).values(
        lease_id="lease_1", group_id=row.group_id, consumer="foreign", leased_at=0.0, expires_at=1.0
    )
    async with store.database.writing() as connection:
        await connection.execute(lease)
    part = await pages.get(f"/view/parts/groups/{row.group_id}/training")
    assert part.status_code == 200
    assert "With the default settings" in part.text
