"""The background loops of an API server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar_proxy.api import ApiContext, BackgroundLoops
from polar_proxy.config import Settings
from polar_proxy.store import Store


async def test_a_loop_goes_on_after_an_unexpected_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polar_proxy.api.background.POLL_SECONDS", 0.001)
    resume_due, tries, resumed = store.jobs.resume_due, 0, asyncio.Event()

    async def fail_once() -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("a bug")
        resumed.set()
        return await resume_due()

    monkeypatch.setattr(store.jobs, "resume_due", fail_once)
    async with asyncio.timeout(60), BackgroundLoops(ApiContext(store, Settings(home=tmp_path))):
        await resumed.wait()
    (record,) = [record for record in caplog.records if record.name == "polar_proxy.api.background"]
    assert "pauses" in record.getMessage()
    assert "a bug" in (record.exc_text or str(record.exc_info))
