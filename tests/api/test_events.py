"""Server-sent events: a job from start to end, across lost connections and several servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from polar_proxy.errors import StoreError
from tests.api.conftest import RunningServer, ServeApi, job_request

pytestmark = pytest.mark.slow

Event = tuple[str, str, dict[str, Any]]


async def listen(http: httpx.AsyncClient, params: dict[str, str], **headers: str) -> AsyncIterator[Event]:
    """Yield (id, name, data) of each event."""
    async with http.stream("GET", "/events", params=params, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                yield fields["id"], fields["event"], orjson.loads(fields["data"])
                fields = {}


def summaries(events: list[Event]) -> list[str]:
    return [f"{name} {data.get('to') or data.get('status', '')}".strip() for _, name, data in events]


async def test_streams_a_job_from_start_to_end(serve_api: ServeApi) -> None:
    async with serve_api(work=True) as running:
        job = await running.post("/jobs", job_request(for_training=True), status=201)
        async with asyncio.timeout(150):
            events = [event async for event in listen(running.trainer, {"job": job["job_id"]})]
        assert summaries(events) == [
            *("job open", "stage queued", "stage preparing", "stage ready", "stage running", "stage scoring"),
            *("stage done", "group finished", "job done", "end"),
        ]
        assert {data["job_id"] for _, _, data in events} == {job["job_id"]}
        assert all(data["at"] > 0 for _, _, data in events[:-1])
        # The events of an ended job can be read again, from the start or from any event on.
        assert [event async for event in listen(running.trainer, {"job": job["job_id"]})] == events
        for place, (cursor, _, _) in enumerate(events[:-1]):
            again = [e async for e in listen(running.trainer, {"job": job["job_id"]}, **{"last-event-id": cursor})]
            assert again == events[place + 1 :]


async def test_continues_on_another_server(serve_api: ServeApi) -> None:
    """Each connection is dropped after one event; the next is made to the other server of the database."""

    async def followed(servers: list[RunningServer], job_id: str) -> list[Event]:
        found: list[Event] = []
        while not found or found[-1][1] != "end":
            http = servers[len(found) % 2].trainer
            headers = {"last-event-id": found[-1][0]} if found else {}
            async for event in listen(http, {"job": job_id}, **headers):
                found.append(event)
                break
        return found

    async with serve_api(work=True) as one, serve_api() as other:
        job = await one.post("/jobs", job_request(samples=2), status=201)
        async with asyncio.timeout(200):
            events = await followed([one, other], job["job_id"])
        assert events == [event async for event in listen(other.admin, {"job": job["job_id"]})]
        assert summaries(events).count("stage done") == 2


async def test_streams_all_jobs_from_now_on(serve_api: ServeApi) -> None:
    async with serve_api() as running:
        await running.post("/jobs", job_request(), status=201)
        seen: list[Event] = []
        listening = asyncio.Event()

        async def follow() -> None:
            async with running.trainer.stream("GET", "/events") as answer:
                async for line in answer.aiter_lines():
                    listening.set()
                    if line.startswith("data: "):
                        seen.append(("", "", orjson.loads(line[6:])))
                        if seen[-1][2].get("status") == "cancelled" and seen[-1][2]["group_id"] is None:
                            return

        task = asyncio.create_task(follow())
        await asyncio.wait_for(listening.wait(), 60)
        job = await running.post("/jobs", job_request(), status=201)
        await running.post(f"/jobs/{job['job_id']}/cancel")
        await asyncio.wait_for(task, 60)
        assert {data["job_id"] for _, _, data in seen} == {job["job_id"]}


async def test_a_stopping_server_ends_its_streams(serve_api: ServeApi) -> None:
    seen: list[Event] = []
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        async with serve_api(grace=600) as running:
            job = await running.post("/jobs", job_request(), status=201)
            http.base_url, http.headers = running.trainer.base_url, running.trainer.headers

            async def follow() -> None:
                async for event in listen(http, {"job": job["job_id"]}):
                    seen.append(event)

            task = asyncio.create_task(follow())
            async with asyncio.timeout(60):
                while len(seen) < 2:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            assert not task.done()
        # The stream ends without `end`, so that the client reconnects elsewhere, and without a grace period.
        await asyncio.wait_for(task, 60)
        assert summaries(seen) == ["job open", "stage queued"]


@pytest.mark.parametrize(
    ("params", "status"), [({"job": "job_none"}, 404), ({"after": "yesterday"}, 400), ({"after": "1-2-3"}, 400)]
)
async def test_rejects_unknown_jobs_and_positions(serve_api: ServeApi, params: dict[str, str], status: int) -> None:
    async with serve_api() as running:
        await running.get("/events", status=status, **params)


async def test_a_database_that_goes_away_breaks_a_stream_off_with_one_line_in_the_log(
    serve_api: ServeApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise StoreError("the database is away")

    async with serve_api() as running, running.trainer.stream("GET", "/events") as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        monkeypatch.setattr(type(running.store.job_events), "read", fail)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            await anext(pieces)
    assert "a response broke off: the database is away" in caplog.text
    assert "Traceback" not in caplog.text
