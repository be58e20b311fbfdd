"""The pages show what is recorded, escape all of it, and page by id."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from polar_proxy.api import ApiContext
from polar_proxy.config import Settings
from polar_proxy.engines.scripted import INFO, ScriptedEngine
from polar_proxy.gateway.http.routes import add_router
from polar_proxy.store import Store
from polar_proxy.view.access import HEADERS
from polar_proxy.view.pages.lists import PAGE
from polar_proxy.view.router import create_view_router
from polar_proxy.view.server import create_pages
from tests.factories import call_record, new_rollout, new_session
from tests.view import recorded

LISTS = ("/", *(f"/view/{name}" for name in ("rollouts", "sessions", "groups", "jobs", "training", "parts/service")))


class TagCounter(HTMLParser):
    """Counts the elements of a page that would run or load something, and its event handlers and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.dangerous: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attributes}
        self.dangerous += [f"{tag} {name}" for name in names if name.startswith("on") or name == "style"]
        if tag in ("script", "img", "iframe", "object", "embed", "style", "base"):
            self.sources.append(f"{tag} {dict(attributes).get('src') or ''}")
        self.dangerous += [
            value for name, value in attributes if (value or "").strip().startswith("javascript:") and name
        ]


def assert_safe(page: str) -> None:
    """Assert that a page runs only Polar's scripts and shows the hostile text as text."""
    found = TagCounter()
    found.feed(page)
    assert found.dangerous == []
    assert {one for one in found.sources if not one.startswith("script /view/assets/")} == set()
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "{{7*7}}" in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("path", LISTS)
async def test_lists_of_an_empty_database_are_shown(pages: httpx.AsyncClient, path: str) -> None:
    answer = await pages.get(path)
    assert answer.status_code == 200
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert answer.headers["cache-control"] == "no-store"


async def test_hostile_texts_are_shown_as_text(pages: httpx.AsyncClient, store: Store) -> None:
    rollout_id, call_id = await recorded.hostile_rollout(store)
    row = await store.rollouts.get(rollout_id)
    assert row is not None
    for path in (
        *("/", "/view/rollouts", "/view/sessions"),
        *(f"/view/rollouts/{rollout_id}", f"/view/sessions/{row.session_id}", f"/view/groups/{row.group_id}"),
        *(f"/view/calls/{call_id}", f"/view/parts/calls/{call_id}"),
        *(f"/view/find?name={'{{7*7}}'}%3Cscript%3E", f"/view/rollouts?where={'{{7*7}}'}%3Cscript%3E"),
    ):
        answer = await pages.get(path)
        assert answer.status_code in (200, 400, 404), path
        assert_safe(answer.text)
    page = (await pages.get(f"/view/rollouts/{rollout_id}")).text
    assert "cannot be parsed" not in page
    assert "\\x1b[31mred" in page
    assert "\\u202egnihton" in page


async def test_a_stored_file_is_sent_as_text(pages: httpx.AsyncClient, store: Store) -> None:
    rollout_id, _ = await recorded.hostile_rollout(store)
    (file, *_) = await store.artifacts.of_rollout(rollout_id)
    answer = await pages.get(f"/view/artifacts/{file.artifact_id}")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.content == file.path.read_bytes()


async def test_a_large_file_is_sent_piece_by_piece(store: Store, tmp_path: Path) -> None:
    rollout_id = await new_rollout(store)
    file = await store.artifacts.add(rollout_id, "patch.diff", bytes(8 << 20))
    path = f"/view/artifacts/{file.artifact_id}"
    scope = {
        "type": "http",
        "asgi": {"spec_version": "2.4"},
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    sizes: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sizes.append(len(message.get("body", b"")))

    local = {"headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 4000), "scheme": "http"}
    await create_pages(store, Settings(home=tmp_path))({**scope, **local}, receive, send)
    assert sum(sizes) == 8 << 20
    assert max(sizes) <= 1 << 20


async def test_a_run_shows_calls_with_edges_rules_and_reasons(pages: httpx.AsyncClient, store: Store) -> None:
    session_id = await recorded.branching_session(store)
    page = (await pages.get(f"/view/sessions/{session_id}")).text
    for edge in ("root", "continues", "retries", "rewinds", "compacts", "subagent", "side_call"):
        assert f'<circle class="{edge}' in page
    assert 'title="A small model writes a title for the list of sessions while the main call runs. Seen in' in page
    assert 'title="Another assistant turn replaces the last answer."' in page
    assert page.count("ambiguous") == 1
    assert "upstream_error" in page


async def test_a_tool_call_is_shown_with_its_result_of_the_next_call(pages: httpx.AsyncClient, store: Store) -> None:
    session_id = await recorded.long_session(store, turns=3, tokens=40, rollout=False)
    first, _, last = await store.calls.summaries(session_id)
    page = (await pages.get(f"/view/parts/calls/{first.call_id}")).text
    assert re.search(r'class="text arguments"[^>]*>command: sed -n 0,9p mean.py<', page)
    assert re.search(r'class="text result"[^>]*>line 0: return total / count<', page)
    assert "no result is recorded" in (await pages.get(f"/view/parts/calls/{last.call_id}")).text


@pytest.mark.parametrize(
    "dialect", ["openai_chat", "anthropic_messages", "openai_responses", "google_generate", "none"]
)
async def test_requests_that_cannot_be_parsed_are_shown_as_received(
    pages: httpx.AsyncClient, store: Store, dialect: str
) -> None:
    session_id = await new_session(store)
    messages = (b"5", b"[[]]", b'{"role":7,"tool_calls":[5],"tool_call_id":[]}', b'{"role":"tool"}', b"{ no json <b>")
    call = call_record(session_id, dialect=dialect, messages=messages, tools=b'[{"function":7}]')
    following = call_record(session_id, dialect=dialect, messages=messages, base_call_id=call.call_id, edge="continues")
    await recorded.commit(store, call, following)
    for path in (f"calls/{call.call_id}", f"sessions/{session_id}", f"parts/calls/{following.call_id}"):
        page = await pages.get(f"/view/{path}")
        assert page.status_code == 200
        assert "The request is shown as received, because it cannot be parsed" in page.text
        assert "{ no json &lt;b&gt;" in page.text


async def test_a_long_conversation_is_cut_in_a_run_and_whole_on_the_page_of_its_call(
    pages: httpx.AsyncClient, store: Store
) -> None:
    session_id = await recorded.long_session(store, turns=110, tokens=8, rollout=False)
    *_, last = await store.calls.summaries(session_id)
    page = (await pages.get(f"/view/sessions/{session_id}")).text
    assert "11 messages before these" in page
    assert page.count('<article class="message') == 101
    whole = (await pages.get(f"/view/calls/{last.call_id}")).text
    assert whole.count('<article class="message') == 112
    assert "As the agent sent it" in whole
    assert "&#34;tool_call_id&#34;: &#34;tool_7&#34;" in whole


async def test_a_rollout_shows_patch_log_reward_and_traces(pages: httpx.AsyncClient, store: Store) -> None:
    session_id = await recorded.long_session(store, turns=2, tokens=40)
    summary = await store.sessions.summary(session_id)
    assert summary is not None
    rollout_id = str(summary.rollout_id)
    patch = b"diff --git a/mean.py b/mean.py\n--- a/mean.py\n+++ b/mean.py\n@@ -1,2 +1,2 @@\n same\n-old\n+new\n"
    await store.artifacts.add(rollout_id, "patch.diff", patch)
    await store.artifacts.add(rollout_id, "tests.log", b"2 passed")
    await store.rewards.add(rollout_id, 1.0, "hidden_tests", {"signs": ["changes_tests"], "solved": True})
    page = (await pages.get(f"/view/rollouts/{rollout_id}")).text
    assert '<tr class="added"><td class="ln"></td><td class="ln">2</td>' in page
    assert "2 passed" in page
    assert '<span class="tag warn">changes_tests</span>' in page
    (trace,) = await store.traces.summaries(session_id)
    assert f'href="/view/traces/{trace.trace_id}"' in page
    assert '<rect class="preparing"' in page
    assert '<rect class="sampling"' in page


@pytest.mark.parametrize("value", [5, "x", [5, "<i>x</i>"], {"a": 1}, [{"kind": 1, "reward": "x"}], None])
async def test_a_reward_with_another_detail_is_shown(pages: httpx.AsyncClient, store: Store, value: Any) -> None:
    rollout_id = await new_rollout(store)
    await store.rewards.add(rollout_id, 1.0, "trainer", {"signs": value, "parts": value})
    answer = await pages.get(f"/view/rollouts/{rollout_id}")
    assert answer.status_code == 200
    assert "<i>x" not in answer.text


async def test_lists_are_paged_by_id(pages: httpx.AsyncClient, store: Store) -> None:
    await recorded.many_rollouts(store, PAGE + 3)
    seen: list[str] = []
    path: str | None = "/view/rollouts?where=status%3Dqueued"
    while path is not None:
        page = (await pages.get(path)).text
        seen += re.findall(r'data-row[^>]*>|href="/view/rollouts/(roll_\w+)"', page)
        older = re.search(r'href="([^"]+)" rel="next"', page)
        path = older[1].replace("&amp;", "&") if older else None
    found = [one for one in seen if one]
    assert len(found) == len(set(found)) == PAGE + 3
    assert found == sorted(found, reverse=True)


async def test_a_wrong_condition_is_explained(pages: httpx.AsyncClient, store: Store) -> None:
    answer = await pages.get("/view/rollouts", params={"where": "colour=red"})
    assert answer.status_code == 400
    assert "Rollouts have no field &#39;colour&#39;" in answer.text
    await new_rollout(store)
    none = await pages.get("/view/rollouts", params={"where": "harness=codex"})
    assert "matches no rollout" in none.text


async def test_search_goes_to_the_record(pages: httpx.AsyncClient, store: Store) -> None:
    session_id = await new_session(store, label="my-agent")
    call = call_record(session_id)
    await store.calls.commit(call)
    for name, path in (("my-agent", f"sessions/{session_id}"), (call.call_id[:-2], f"calls/{call.call_id}")):
        answer = await pages.get("/view/find", params={"name": name})
        assert (answer.status_code, answer.headers["location"]) == (303, f"/view/{path}")
    await store.training.put_run("run_1", "first", {}, [])
    for name, path in (("group_1", "groups/group_1"), ("run_1", "training/run_1"), ("trc_1", "traces/trc_1")):
        answer = await pages.get("/view/find", params={"name": name})
        assert answer.headers["location"] == f"/view/{path}"
    assert (await pages.get("/view/find", params={"name": "nothing"})).status_code == 404


@pytest.mark.parametrize(
    "path", ["rollouts/x", "sessions/x", "calls/x", "groups/x", "traces/x", "calls/x/sequence", "artifacts/x", "x/y"]
)
async def test_what_does_not_exist_is_a_page_with_status_404(pages: httpx.AsyncClient, path: str) -> None:
    answer = await pages.get(f"/view/{path}")
    assert answer.status_code == 404
    assert "<h1>Not found</h1>" in answer.text


async def test_tokens_are_sent_with_texts_and_origin(pages: httpx.AsyncClient, store: Store) -> None:
    session_id = await recorded.long_session(store, turns=3, tokens=40)
    (trace,) = await store.traces.find(session_id=session_id)
    head = (await pages.get(f"/view/traces/{trace.trace_id}/head")).json()
    assert head["length"] == len(trace.token_ids)
    assert [span["kind"] for span in head["spans"]] == ["context", "sampled"] * 3
    assert [span["at"] for span in head["spans"]] == [0, 20, 30, 40, 50, 60]
    assert head["spans"][1]["versions"] == [[0, "0"]]
    chunk = (await pages.get(f"/view/traces/{trace.trace_id}/tokens", params={"start": 10})).json()
    assert chunk["ids"] == trace.token_ids[10:].tolist()
    recorded_values = [None if np.isnan(value) else round(float(value), 4) for value in trace.logprobs[10:]]
    assert chunk["logprobs"] == recorded_values
    assert set(chunk["texts"]) == set(map(str, chunk["ids"]))
    text = "".join(chunk["texts"][str(one)] for one in chunk["ids"])
    assert "return total" in text


async def test_drift_is_found_at_its_place(pages: httpx.AsyncClient, store: Store) -> None:
    session_id = await recorded.drifting_session(store)
    traces = await store.traces.summaries(session_id)
    heads = [(await pages.get(f"/view/traces/{trace.trace_id}/head")).json() for trace in traces]
    (finding,) = [finding for head in heads for finding in head["findings"]]
    assert finding["at"] == 3
    assert finding["text"].startswith("Drift (split): the prompt of call_")


async def test_a_token_page_that_is_opened_again_shows_the_new_grade(pages: httpx.AsyncClient, store: Store) -> None:
    (trace, *_) = await store.traces.summaries(await recorded.drifting_session(store))
    path = f"/view/traces/{trace.trace_id}"
    assert 'class="grade rejected"' not in (await pages.get(path)).text
    await store.traces.set_audit(trace.trace_id, "rejected", {})
    assert 'class="grade rejected"' in (await pages.get(path)).text
    assert (await pages.get(f"{path}/head")).json()["facts"]["grade"] == "rejected"


class VersionedEngine(ScriptedEngine):
    """An engine that knows its policy version, but not its load."""

    async def weight_version(self) -> str | None:
        return "17"


async def test_the_overview_shows_every_engine(store: Store, tmp_path: Path) -> None:
    engines = {"judge": ScriptedEngine(info=replace(INFO, model="judge-model"))}
    context = ApiContext(store, Settings(home=tmp_path), engine=VersionedEngine(), engines=engines)
    app = FastAPI()
    add_router(app, create_view_router(context, open_on_loopback=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        part = (await http.get("/view/parts/service")).text
    assert part.count("healthy") == 2
    assert re.search(r"<b>judge</b>\s+judge-model", part)
    assert "scripted-model" in part
    assert "version 17" in part


def test_the_pages_load_no_pytorch() -> None:
    """It would cost each server 180 MB."""
    program = "import sys, polar_proxy.view; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
