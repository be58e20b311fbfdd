"""A run as one file: complete, without scripts, links and secrets, and safe whatever an agent wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.view.pages import run
from polar_proxy.view.report import make_report
from tests.factories import call_record, new_session
from tests.view import recorded
from tests.view.test_pages import assert_safe


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


async def test_a_file_has_all_calls_and_tokens(store: Store, settings: Settings) -> None:
    session_id = await recorded.long_session(store, turns=3, tokens=40)
    page = await make_report(store, settings, session_id)
    for turn in range(3):
        assert f"I read part {turn} of the file." in page
        assert f"<summary>Call {turn + 1}</summary>" in page
    assert len(re.findall(r'<span class="t s[^"]*" title="\d+, log-probability -', page)) == 30
    assert "return total" in page


async def test_a_file_has_more_calls_than_a_page(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MOST_CALLS", 2)
    session_id = await recorded.long_session(store, turns=5, tokens=40)
    page = await make_report(store, settings, session_id)
    assert re.findall(r"<summary>Call (\d+)</summary>", page) == ["1", "2", "3", "4", "5"]
    assert "Calls before" not in page
    assert "Calls after" not in page


async def test_a_file_loads_and_links_nothing(store: Store, settings: Settings) -> None:
    rollout_id, _ = await recorded.hostile_rollout(store)
    page = await make_report(store, settings, rollout_id)
    assert_safe(page.replace("<style>", "").replace("</style>", ""))
    assert "<script" not in page
    assert re.findall(r'<[^>]* (?:href|src|action)="[^#"][^"]*"', page) == []
    assert "default-src 'none'" in page


async def test_a_file_has_no_secrets(store: Store, settings: Settings) -> None:
    secret = "sk-proj-" + "a1B2c3D4" * 6
    session_id = await new_session(store)
    call = call_record(session_id, messages=(recorded.message("user", f"My key is {secret}"),))
    await recorded.commit(store, call)
    page = await make_report(store, settings, session_id)
    assert "My key is" in page
    assert secret not in page


async def test_a_call_alone_is_refused(store: Store, settings: Settings) -> None:
    call = call_record(await new_session(store))
    await recorded.commit(store, call)
    with pytest.raises(UsageError, match="Name a rollout or a session instead"):
        await make_report(store, settings, call.call_id)
