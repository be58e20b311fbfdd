"""Sessions, records, exports and keys over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import orjson
import pytest
import pytest_asyncio
from pydantic import ValidationError

from polar_proxy.api import allow_all, create_api
from polar_proxy.api_models import ExportSummary, KeyRequest, RemarkRequest, RewardRequest, RolloutList
from polar_proxy.client import AsyncClient, BadRequestError, NotFoundError, UnreachableError
from polar_proxy.client.inprocess import InProcessTransport
from polar_proxy.config import Settings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.export.exporter import export
from polar_proxy.store import Store, open_store
from polar_proxy.types import Json
from tests.export.recorded_runs import rollout, session_without_rollout
from tests.factories import answer, call_record, engine_info, new_session


@pytest_asyncio.fixture
async def client(store: Store) -> AsyncIterator[AsyncClient]:
    async with ScriptedEngine() as engine:
        app = create_api(store, settings=Settings(), engine=engine, auth=allow_all)
        async with AsyncClient("http://here", transport=InProcessTransport(app)) as made:
            yield made


async def test_lists_sessions_in_pages(client: AsyncClient, store: Store) -> None:
    made = [await new_session(store, label=f"run {number}") for number in range(3)]
    page = await client.sessions(limit=2)
    assert [(one.session_id, one.label) for one in page.sessions] == [(made[2], "run 2"), (made[1], "run 1")]
    assert [one.session_id for one in (await client.sessions(before=made[1])).sessions] == [made[0]]


async def test_unmatched_conditions_list_existing_values(client: AsyncClient, store: Store) -> None:
    rollout_id, _ = await rollout(store, reward=0.5)
    found = await client.rollouts(where="harness=codex")
    assert (found.rollouts, "Values of harness: mini-swe-agent (1)." in str(found.note)) == ([], True)
    for where in (None, "reward=0.5"):
        assert (await client.rollouts(where=where)).note is None
        assert await client.rollouts(where=where, before=rollout_id) == RolloutList(rollouts=[])


async def test_returns_a_record_by_each_kind_of_name(client: AsyncClient, store: Store) -> None:
    rollout_id, calls = await rollout(store, reward=1.0)
    found = (await client.record(rollout_id)).rollout
    assert found is not None
    assert (found.reward, found.instruction, len(found.rewards)) == (1.0, "Fix the bug.", 1)
    assert found.session is not None
    assert [call.call_id for call in found.session.calls] == [call.call_id for call in calls]
    assert (await client.record("last")).session == found.session
    call = (await client.record(calls[0].call_id)).call
    assert call is not None
    assert call.prompt_ids == calls[0].prompt_ids.tolist()  # type: ignore[union-attr]
    assert call.choices[0].token_texts is None
    with pytest.raises(NotFoundError, match=store.location):
        await client.record("nobody")


async def test_token_texts_come_from_the_servers_engine(client: AsyncClient, store: Store) -> None:
    session_id = await new_session(store)
    scripted = engine_info(engine="scripted", model="scripted-model")
    mine = call_record(session_id, engine=scripted, choices=(answer([107, 108]),))
    damaged = call_record(session_id, engine=scripted, choices=(answer([-5]),))
    other = call_record(session_id, engine=engine_info(model="someone/else"))
    for record in (mine, other, damaged):
        await store.calls.commit(record)
    call = (await client.record(mine.call_id, tokens=True)).call
    assert call is not None
    assert (call.choices[0].token_texts, call.texts_problem) == (["h", "i"], None)
    call = (await client.record(other.call_id, tokens=True)).call
    assert call is not None
    assert call.choices[0].token_texts is None
    assert "tokenizer of someone/else" in str(call.texts_problem)
    call = (await client.record(damaged.call_id, tokens=True)).call
    assert call is not None
    assert "no token -5" in str(call.texts_problem)


async def exported(client: AsyncClient, form: str, **options: Json) -> tuple[list[bytes], ExportSummary]:
    *lines, report = [item async for item in client.export(form, **options)]  # type: ignore[arg-type]
    assert isinstance(report, ExportSummary)
    return [line for line in lines if isinstance(line, bytes)], report


@pytest.mark.parametrize("form", ["jsonl", "tokens-jsonl", "tinker", "nemo-rl"])
async def test_an_export_over_http_is_the_export_of_the_database(client: AsyncClient, store: Store, form: str) -> None:
    await rollout(store, reward=1.0)
    await rollout(store, reward=0.0)
    session_id, _ = await session_without_rollout(store)
    written: list[bytes] = []
    report = await export(store, form, written.append)
    lines, summary = await exported(client, form)
    assert len(lines) == summary.rows == report.rows
    if form != "tokens-jsonl":  # its certificates have new ids each time that a session is built on request
        assert lines == written
    assert (summary.left_out, summary.reasons) == (dict(report.left_out), report.reasons)
    _, summary = await exported(client, form, sessions=[session_id])  # type: ignore[arg-type]
    assert (summary.rollouts, summary.sessions) == (0, 1)


async def test_a_row_of_several_megabytes_arrives_whole(client: AsyncClient, store: Store) -> None:
    long = orjson.dumps({"role": "user", "content": "x" * 2_500_000})
    session_id = await new_session(store)
    await store.calls.commit(call_record(session_id, messages=(long,)))
    (line,), _ = await exported(client, "jsonl")
    assert orjson.loads(line)["calls"][0]["messages"] == [orjson.loads(long)]


@pytest.mark.parametrize(
    "options",
    [{"form": "nope"}, {"where": "colour=1"}, {"sessions": ["sess_0"]}, {"advantage": "x", "form": "trl"}],
)
async def test_an_invalid_export_is_refused_before_it_begins(client: AsyncClient, options: Json) -> None:
    with pytest.raises(BadRequestError):
        await anext(aiter(client.export(**options)))


async def test_an_export_without_its_counts_is_not_complete() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=orjson.dumps({"schema": 1}) + b"\n"))
    async with AsyncClient("http://here", transport=transport) as client:
        with pytest.raises(UnreachableError, match="broke off before its end"):
            _ = [row async for row in client.export()]


async def test_adds_rewards_to_a_session_without_a_rollout(client: AsyncClient, store: Store) -> None:
    session_id, calls = await session_without_rollout(store)
    rollout_id, others = await rollout(store, reward=None)
    given = await client.reward(RewardRequest(session_id=session_id, value=0.5, source="human:anna"))
    assert (given.session_id, given.rollout_id, given.value) == (session_id, None, 0.5)
    await client.reward(RewardRequest(session_id=session_id, value=9.0, source="judge", call_id=calls[0].call_id))
    found = (await client.record(session_id)).session
    assert found is not None
    assert (found.reward, [reward.value for reward in found.rewards]) == (0.5, [0.5, 9.0])
    with pytest.raises(NotFoundError, match="call of this session"):
        await client.reward(RewardRequest(session_id=session_id, value=1, source="x", call_id=others[0].call_id))
    with pytest.raises(NotFoundError, match="no session sess_0"):
        await client.reward(RewardRequest(session_id="sess_0", value=1, source="x"))
    with pytest.raises(BadRequestError, match=rollout_id):
        await client.reward(RewardRequest(session_id=others[0].session_id, value=1, source="x"))
    for targets in ({}, {"session_id": session_id, "rollout_id": rollout_id}):
        with pytest.raises(ValidationError, match="either rollout_id or session_id"):
            RewardRequest(value=1, source="x", **targets)


async def test_keys_are_made_listed_and_revoked(client: AsyncClient, store: Store) -> None:
    made = await client.new_key(KeyRequest(role="trainer", label="gpu box"))
    assert [(key.name, key.label) for key in (await client.keys()).keys] == [(made.name, "gpu box")]
    assert made.key not in str(await client.keys())
    assert (await client.revoke_key(made.name)).revoked_at is not None
    with pytest.raises(NotFoundError, match="no API key"):
        await client.revoke_key("abcdef123456")


async def test_the_location_of_a_database_has_no_credentials() -> None:
    from polar_proxy.store.urls import database_location

    url = "postgresql://polar:s3cret@db.example.com:5433/runs?password=x&sslmode=require"
    assert database_location(url) == "postgresql://db.example.com:5433/runs"
    async with open_store("here.db") as store:
        assert store.location.endswith("/here.db")


async def test_remarks_are_kept_with_their_author_and_select_rollouts(client: AsyncClient, store: Store) -> None:
    rollout_id, calls = await rollout(store, reward=1.0)
    for kind, value in (("label", {"text": "odd"}), ("note", {"text": "why?"}), ("rating", {"value": 4})):
        given = await client.remark(RemarkRequest(rollout_id=rollout_id, kind=kind, **value))
        assert (given.rollout_id, given.kind, given.author) == (rollout_id, kind, "this machine")
    found = await client.rollout(rollout_id)
    assert (found.label, found.rating) == ("odd", 4.0)
    assert [(one.kind, one.text, one.value) for one in found.remarks] == [
        ("label", "odd", None),
        ("note", "why?", None),
        ("rating", None, 4.0),
    ]
    assert len((await client.rollouts(where="label=odd, rating>=4")).rollouts) == 1
    record = (await client.record(rollout_id)).rollout
    assert record is not None
    assert record.remarks == found.remarks
    for body, problem in (
        (RemarkRequest(rollout_id=rollout_id, kind="rating", value=6), "from 1 to 5"),
        (RemarkRequest(rollout_id=rollout_id, kind="note"), "is empty"),
        (RemarkRequest(session_id=calls[0].session_id, kind="label", text="x"), rollout_id),
    ):
        with pytest.raises(BadRequestError, match=problem):
            await client.remark(body)
    with pytest.raises(NotFoundError, match="no rollout roll_0"):
        await client.remark(RemarkRequest(rollout_id="roll_0", kind="label", text="x"))


async def test_remarks_of_a_session_without_a_rollout_are_in_its_record(client: AsyncClient, store: Store) -> None:
    session_id, _ = await session_without_rollout(store)
    await client.remark(RemarkRequest(session_id=session_id, kind="note", text="kept"))
    found = (await client.record(session_id)).session
    assert found is not None
    assert [one.text for one in found.remarks] == ["kept"]
