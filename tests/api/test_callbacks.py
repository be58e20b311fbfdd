"""Signed callbacks: each group and the end of the job, again until they are taken, over a restart of the server."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_proxy.api.callbacks import SECRET_FILE
from polar_proxy.errors import UsageError
from polar_proxy.store.service.job_events import CallbackRow
from polar_proxy.webhooks import BadCallbackError, verify_callback
from tests.api.conftest import RunningServer, ServeApi, job_request
from tests.api.receiver import callback_receiver

SECRET = "whsec_" + base64.b64encode(b"a secret of twenty-four.").decode()
FAST = {"callback_pause_seconds": 0.05, "callback_timeout_seconds": 60.0}


async def cancelled_job(running: RunningServer, url: str) -> str:
    """A job that ends without being worked on."""
    job = await running.post("/jobs", job_request(callback_url=url), status=201)
    await running.post(f"/jobs/{job['job_id']}/cancel")
    return str(job["job_id"])


async def until_over(running: RunningServer, job_id: str) -> list[CallbackRow]:
    async with asyncio.timeout(120):
        while any(row.next_attempt_at is not None for row in await running.store.callbacks.of_job(job_id)):
            await asyncio.sleep(0.05)
    return await running.store.callbacks.of_job(job_id)


async def test_each_group_and_the_end(serve_api: ServeApi) -> None:
    async with callback_receiver() as receiver, serve_api(work=True, callback_secret=SECRET, **FAST) as running:
        job = await running.post("/jobs", job_request(callback_url=receiver.url), status=201)
        await receiver.until(2)
        told = {}
        for headers, body in receiver.got:
            said = verify_callback(headers, body, SECRET)
            told[said.type] = said.data
            with pytest.raises(BadCallbackError):
                verify_callback(headers, body + b" ", SECRET)
            assert SECRET.encode() not in body
        assert told["job.ended"]["job_id"] == job["job_id"]
        assert told["job.ended"]["status"] == "done"
        group = await running.get(f"/groups/{told['group.finished']['group_id']}")
        assert told["group.finished"] == group
        assert [row["reward"] for row in group["rollouts"]] == [1.0]
        assert {row.error for row in await until_over(running, job["job_id"])} == {None}
        assert len(receiver.got) == 2


async def test_again_until_it_is_taken(serve_api: ServeApi) -> None:
    """The same id and the same bytes each time, with a signature of its own time. A redirection is not followed."""
    async with callback_receiver(500, 302, 429) as receiver, serve_api(callback_secret=SECRET, **FAST) as running:
        job_id = await cancelled_job(running, receiver.url)
        (row,) = await until_over(running, job_id)
        assert (row.attempts, row.error, row.delivered_at is not None) == (4, None, True)
        assert len(receiver.got) == 4
        assert len({body for _, body in receiver.got}) == 1
        assert {headers["webhook-id"] for headers, _ in receiver.got} == {row.callback_id}
        for headers, body in receiver.got:
            assert verify_callback(headers, body, SECRET).data["status"] == "cancelled"


async def test_given_up(serve_api: ServeApi) -> None:
    async with callback_receiver(410) as receiver, serve_api(callback_attempts=3, **FAST) as running:
        (gone,) = await until_over(running, await cancelled_job(running, receiver.url))
        assert (gone.attempts, gone.error, gone.delivered_at) == (1, "answered 410", None)
        (nobody,) = await until_over(running, await cancelled_job(running, "http://127.0.0.1:1/"))
        assert nobody.attempts == 3
        assert "ConnectError" in str(nobody.error)


async def test_over_a_restart_with_the_secret_of_this_machine(serve_api: ServeApi, tmp_path: Path) -> None:
    """What a server could not deliver the next one does; its secret is in a file that only the owner reads."""
    async with callback_receiver(503) as receiver:
        async with serve_api(callback_pause_seconds=600) as running:
            job_id = await cancelled_job(running, receiver.url)
            async with asyncio.timeout(60):
                while [row.error for row in await running.store.callbacks.of_job(job_id)] != ["answered 503"]:
                    await asyncio.sleep(0.05)
        assert len(receiver.got) == 1
        async with serve_api() as running:
            async with running.store.database.writing() as connection:  # its pause is over
                await connection.exec_driver_sql("UPDATE callbacks SET next_attempt_at = 1")
            (row,) = await until_over(running, job_id)
        assert row.delivered_at is not None
        file = tmp_path / "home" / SECRET_FILE
        assert file.stat().st_mode & 0o777 == 0o600
        for headers, body in receiver.got:
            assert verify_callback(headers, body, file.read_text().strip()).type == "job.ended"


async def test_two_servers_send_each_once(serve_api: ServeApi) -> None:
    async with callback_receiver() as receiver, serve_api(**FAST) as one, serve_api(**FAST) as other:
        ids = [await cancelled_job(one, receiver.url) for _ in range(10)]
        for job_id in ids:
            await until_over(other, job_id)
        told = [orjson.loads(body)["data"]["job_id"] for _, body in receiver.got]
        assert sorted(told) == sorted(ids)


@pytest.mark.parametrize("secret", ["hunter2", "whsec_###"])
async def test_a_secret_that_is_none(serve_api: ServeApi, secret: Any) -> None:
    with pytest.raises(UsageError, match="whsec_") as error:
        async with serve_api(callback_secret=secret):
            pass
    assert secret not in str(error.value)
