"""Callbacks: signed, for each group and the end of the job, retried until accepted, across server restarts."""

from __future__ import annotations

import asyncio
import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_proxy.api.background import SECRET_FILE, callback_secret
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.store.service.job_events import CallbackRow
from polar_proxy.webhooks import BadCallbackError, verify_callback
from tests.api.conftest import RunningServer, ServeApi, job_request
from tests.api.receiver import callback_receiver

pytestmark = pytest.mark.slow

SECRET = "whsec_" + base64.b64encode(b"a secret of twenty-four.").decode()
FAST = {"callback_pause_seconds": 0.05, "callback_timeout_seconds": 60.0}


async def cancelled_job(running: RunningServer, url: str) -> str:
    """Submit and cancel a job, so that it ends without running."""
    job = await running.post("/jobs", job_request(callback_url=url), status=201)
    await running.post(f"/jobs/{job['job_id']}/cancel")
    return str(job["job_id"])


async def until_delivered(running: RunningServer, job_id: str) -> list[CallbackRow]:
    async with asyncio.timeout(120):
        while any(row.next_attempt_at is not None for row in await running.store.callbacks.of_job(job_id)):
            await asyncio.sleep(0.05)
    return await running.store.callbacks.of_job(job_id)


async def test_groups_and_the_end_of_the_job_are_reported(serve_api: ServeApi) -> None:
    async with callback_receiver() as receiver, serve_api(work=True, callback_secret=SECRET, **FAST) as running:
        job = await running.post("/jobs", job_request(callback_url=receiver.url), status=201)
        await receiver.until(2)
        payloads = {}
        for headers, body in receiver.got:
            payload = verify_callback(headers, body, SECRET)
            payloads[payload.type] = payload.data
            with pytest.raises(BadCallbackError):
                verify_callback(headers, body + b" ", SECRET)
            assert SECRET.encode() not in body
        assert payloads["job.ended"]["job_id"] == job["job_id"]
        assert payloads["job.ended"]["status"] == "done"
        group = await running.get(f"/groups/{payloads['group.finished']['group_id']}")
        assert payloads["group.finished"] == group
        assert [row["reward"] for row in group["rollouts"]] == [1.0]
        assert {row.error for row in await until_delivered(running, job["job_id"])} == {None}
        assert len(receiver.got) == 2


async def test_retries_until_accepted(serve_api: ServeApi) -> None:
    """Each try has the same id and body, with a new signature. A redirect is not followed."""
    async with callback_receiver(500, 302, 429) as receiver, serve_api(callback_secret=SECRET, **FAST) as running:
        job_id = await cancelled_job(running, receiver.url)
        (row,) = await until_delivered(running, job_id)
        assert (row.attempts, row.error, row.delivered_at is not None) == (4, None, True)
        assert len(receiver.got) == 4
        assert len({body for _, body in receiver.got}) == 1
        assert {headers["webhook-id"] for headers, _ in receiver.got} == {row.callback_id}
        for headers, body in receiver.got:
            assert verify_callback(headers, body, SECRET).data["status"] == "cancelled"


async def test_gives_up_after_410_or_the_last_attempt(serve_api: ServeApi) -> None:
    async with callback_receiver(410) as receiver, serve_api(callback_attempts=3, **FAST) as running:
        (gone,) = await until_delivered(running, await cancelled_job(running, receiver.url))
        assert (gone.attempts, gone.error, gone.delivered_at) == (1, "answered 410", None)
        (nobody,) = await until_delivered(running, await cancelled_job(running, "http://127.0.0.1:1/"))
        assert nobody.attempts == 3
        assert "ConnectError" in str(nobody.error)


async def test_the_next_server_delivers_with_the_stored_secret(serve_api: ServeApi, tmp_path: Path) -> None:
    """The secret is in a file that only its owner can read."""
    async with callback_receiver(503) as receiver:
        async with serve_api(callback_pause_seconds=600) as running:
            job_id = await cancelled_job(running, receiver.url)
            async with asyncio.timeout(60):
                while [row.error for row in await running.store.callbacks.of_job(job_id)] != ["answered 503"]:
                    await asyncio.sleep(0.05)
        assert len(receiver.got) == 1
        async with serve_api() as running:
            async with running.store.database.writing() as connection:  # end the pause now
                await connection.exec_driver_sql("UPDATE callbacks SET next_attempt_at = 1")
            (row,) = await until_delivered(running, job_id)
        assert row.delivered_at is not None
        file = tmp_path / "home" / SECRET_FILE
        assert file.stat().st_mode & 0o777 == 0o600
        for headers, body in receiver.got:
            assert verify_callback(headers, body, file.read_text().strip()).type == "job.ended"


async def test_two_servers_deliver_each_callback_once(serve_api: ServeApi) -> None:
    async with callback_receiver() as receiver, serve_api(**FAST) as one, serve_api(**FAST) as other:
        ids = [await cancelled_job(one, receiver.url) for _ in range(10)]
        for job_id in ids:
            await until_delivered(other, job_id)
        job_ids = [orjson.loads(body)["data"]["job_id"] for _, body in receiver.got]
        assert sorted(job_ids) == sorted(ids)


def test_servers_that_start_at_the_same_time_have_one_secret(tmp_path: Path) -> None:
    def start(number: int) -> str:
        barrier.wait(10)
        return callback_secret(Settings(home=tmp_path / "home"))

    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(start, range(8)))) == 1


@pytest.mark.parametrize("secret", ["hunter2", "whsec_###"])
async def test_rejects_invalid_secrets(serve_api: ServeApi, secret: Any) -> None:
    with pytest.raises(UsageError, match="whsec_") as error:
        async with serve_api(callback_secret=secret):
            pass
    assert secret not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/x", "http://localhost:1/x", "http://a.localhost/x", "http://[::1]/x", "http://10.0.0.1/x"),
        *("http://169.254.169.254/latest/meta-data", "http://[fe80::1]/x", "http://0.0.0.0/x", "http://224.0.0.1/x"),
        *("http://[::ffff:127.0.0.1]/x", "http://[64:ff9b::7f00:1]/x", "http://[2002:7f00:1::]/x"),
    ],
)
async def test_callbacks_to_private_addresses_need_a_setting(serve_api: ServeApi, url: str) -> None:
    async with serve_api(private_callbacks=False) as running:
        error = await running.post("/jobs", job_request(callback_url=url), status=400)
        assert "is not a public address" in error["error"]["message"]


async def test_a_name_that_leads_to_a_private_address_is_not_called(
    serve_api: ServeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is checked when the connection is made, whatever the name led to before."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def getaddrinfo(host: str, port: int, **how: Any) -> Any:
        return await resolve("127.0.0.1" if host == "receiver.example" else host, port, **how)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    async with callback_receiver() as receiver:
        url = receiver.url.replace("127.0.0.1", "receiver.example")
        async with serve_api(private_callbacks=False, callback_attempts=1, **FAST) as running:
            (row,) = await until_delivered(running, await cancelled_job(running, url))
        assert "has the address 127.0.0.1, which is not public" in str(row.error)
        assert receiver.got == []
