"""Labels, notes, ratings and rewards given in the page: who may give them, what is stored, and what is refused."""

from __future__ import annotations

import httpx
import orjson
import pytest

from polar_proxy.engines.bundled import POLAR_TINY_NAME
from polar_proxy.store import Store
from tests.factories import new_rollout, new_session
from tests.view import recorded
from tests.view.recorded import HOSTILE
from tests.view.visitors import Connect, add_key, log_in


async def give(http: httpx.AsyncClient, record: str, kind: str, value: str) -> httpx.Response:
    origin = {"origin": str(http.base_url).rstrip("/")}
    return await http.post(f"/view/remarks/{record}", data={"kind": kind, "value": value}, headers=origin)


async def test_what_a_person_gives_is_stored_with_author_and_time(connect: Connect, store: Store) -> None:
    session_id = await new_session(store, origin="rollout")
    rollout_id = await new_rollout(store, session_id)
    async with connect() as http:
        await log_in(http, await add_key(store))
        for kind, value in (("label", "odd"), ("note", HOSTILE), ("rating", "2"), ("rating", "4"), ("reward", "0.5")):
            answer = await give(http, f"rollouts/{rollout_id}", kind, value)
            assert (answer.status_code, answer.headers["location"]) == (303, f"/view/rollouts/{rollout_id}#remarks")
        page = (await http.get(f"/view/rollouts/{rollout_id}")).text
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    assert (row.label, row.rating, row.reward) == ("odd", 4.0, 0.5)
    remarks = await store.remarks.of_rollout(rollout_id)
    assert [(one.kind, one.text, one.value) for one in remarks] == [
        ("label", "odd", None),
        ("note", HOSTILE, None),
        ("rating", None, 2.0),
        ("rating", None, 4.0),
    ]
    (key,) = await store.api_keys.all()
    assert {one.author for one in remarks} == {f"{key.label or 'key'} {key.name}"}
    assert [reward.source for reward in await store.rewards.of_rollout(rollout_id)] == [f"person: {remarks[0].author}"]
    assert "<script>document" not in page
    assert [found.rollout_id for found in await store.rollouts.find(where="label=odd, rating>=4")] == [rollout_id]


async def test_a_session_without_a_rollout_is_rated(connect: Connect, store: Store) -> None:
    session_id = await new_session(store)
    of_rollout = await new_session(store, origin="rollout", rollout_id=await new_rollout(store))
    async with connect() as http:
        await log_in(http, await add_key(store))
        await give(http, f"sessions/{session_id}", "label", "kept")
        refused = await give(http, f"sessions/{of_rollout}", "label", "kept")
    session = await store.sessions.get(session_id)
    assert session is not None
    assert session.label == "kept"
    assert refused.status_code == 400
    assert "belongs to a rollout" in refused.text


@pytest.mark.parametrize(
    ("kind", "value", "problem"),
    [
        ("rating", "6", "from 1 to 5"),
        ("rating", "nan", "not a number"),
        ("reward", "much", "not a number"),
        ("note", "  ", "is empty"),
        ("note", "x" * 20_001, "at most 20000"),
        ("verdict", "1", "a label, a note, a rating or a reward"),
    ],
)
async def test_an_invalid_value_is_refused(connect: Connect, store: Store, kind: str, value: str, problem: str) -> None:
    rollout_id = await new_rollout(store)
    async with connect() as http:
        await log_in(http, await add_key(store))
        answer = await give(http, f"rollouts/{rollout_id}", kind, value)
    assert answer.status_code == 400
    assert problem in answer.text
    assert await store.remarks.of_rollout(rollout_id) == []


async def test_only_who_is_logged_in_may_give(connect: Connect, store: Store) -> None:
    rollout_id = await new_rollout(store)
    async with connect(open_on_loopback=True) as http:
        answer = await give(http, f"rollouts/{rollout_id}", "label", "x")
        assert answer.headers["location"].startswith("/view/login")
    async with connect() as http:
        await log_in(http, await add_key(store))
        foreign = await http.post(
            f"/view/remarks/rollouts/{rollout_id}", data={"kind": "label"}, headers={"origin": "http://evil.example"}
        )
        assert foreign.status_code == 403
    assert await store.remarks.of_rollout(rollout_id) == []


async def test_pages_over_a_database_alone_write_nothing(pages: httpx.AsyncClient, store: Store) -> None:
    rollout_id = await new_rollout(store)
    assert "/view/remarks" not in (await pages.get(f"/view/rollouts/{rollout_id}")).text
    assert (await give(pages, f"rollouts/{rollout_id}", "label", "x")).status_code in (303, 404, 405)
    assert await store.remarks.of_rollout(rollout_id) == []


async def test_the_rows_of_a_filter_are_downloaded(pages: httpx.AsyncClient, store: Store) -> None:
    session_id = await recorded.long_session(store, turns=2, tokens=40)
    await new_rollout(store)
    answer = await pages.get("/view/export", params={"where": f"model={POLAR_TINY_NAME}", "format": "tokens-jsonl"})
    assert answer.headers["content-disposition"] == 'attachment; filename="polar-export.jsonl"'
    *rows, report = answer.text.splitlines()
    assert orjson.loads(rows[0])["session_id"] == session_id
    assert "export_report" in report
    assert (await pages.get("/view/export", params={"format": "nope"})).status_code == 400


async def test_a_form_that_is_too_long_is_refused(connect: Connect, store: Store) -> None:
    rollout_id = await new_rollout(store)
    async with connect() as http:
        await log_in(http, await add_key(store))
        answer = await give(http, f"rollouts/{rollout_id}", "note", "x" * 140_000)
        assert (answer.status_code, "Shorten its text" in answer.text) == (413, True)
        assert (await log_in(http, "k" * 140_000)).status_code == 413
    assert await store.remarks.of_rollout(rollout_id) == []
