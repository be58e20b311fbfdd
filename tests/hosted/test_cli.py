"""The commands with hosted models: serve, doctor, sessions, show, archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import tiktoken

from tests.cli.runner import polar_error, polar_json, polar_ok, polar_serve
from tests.fakes.providers import KEY, Provider, Scripted
from tests.hosted.stand_ins import PROVIDERS, providers, running

pytestmark = pytest.mark.slow

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 3, "n": 1}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_ENGINE__API_KEY", KEY)


def serve_one_call(api: Provider, provider: str) -> None:
    """Run `polar serve` as the guide says, send a request, and stop it."""

    def ask(ready: dict[str, Any]) -> None:
        url, headers = ready["url"] + "/v1/chat/completions", {"authorization": "Bearer agent"}
        answer = httpx.post(url, json=CHAT, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text

    done = polar_serve(ask, "--engine", provider, "--engine-url", api.url, "--model", api.model)
    assert done.exit_code == 130
    assert KEY not in done.stderr


@providers
def test_serve_records_and_show_prints_tokens_and_price(polar_home: Path, provider: str) -> None:
    api = PROVIDERS[provider]()
    api.script(Scripted("Hello."))
    with running(api):
        serve_one_call(api, provider)
    (session,) = polar_json("sessions")["sessions"]
    assert (session["prompt_tokens"], session["completion_tokens"]) == (100, 20)
    assert session["price_usd"] > 0
    shown = polar_json("show", "last")
    (call,) = shown["calls"]
    assert (call["input_tokens"], call["output_tokens"], call["price_usd"]) == (100, 20, session["price_usd"])
    detail = polar_json("show", call["call_id"])
    assert (detail["usage"]["model"], detail["usage"]["cached_tokens"]) == (api.model, 30)
    printed = polar_ok("show", call["call_id"])
    price = f"{session['price_usd']:.4f} USD"
    assert f"{api.model}  100 prompt tokens, 20 sampled, 30 from the cache, 5 of reasoning  {price}" in printed
    if provider == "anthropic":
        assert "not carried to the provider: seed" in printed
    assert price.removesuffix(" USD") in polar_ok("sessions")
    assert price in polar_ok("show", "last")
    assert "0 problems" in polar_ok("db", "verify") or polar_json("db", "verify")["faults"] == []


def test_archives_keep_tokens_prices_and_signatures(polar_home: Path, tmp_path: Path) -> None:
    api = PROVIDERS["anthropic"]()
    api.script(Scripted("Hello.", reasoning="Hm."))
    with running(api):
        serve_one_call(api, "anthropic")
    before = polar_json("show", "last")
    archive, copy = str(tmp_path / "runs.polar"), str(tmp_path / "copy.db")
    polar_ok("db", "export", archive)
    polar_ok("db", "upgrade", "--db", copy)
    polar_ok("db", "import", archive, "--db", copy)
    after = polar_json("show", "last", "--db", copy)
    assert after["price_usd"] == before["price_usd"]
    call_id = before["calls"][0]["call_id"]
    assert polar_json("show", call_id, "--db", copy)["usage"] == polar_json("show", call_id)["usage"]
    assert polar_json("db", "verify", "--db", copy)["faults"] == []


def test_tokens_of_a_hosted_answer_are_shown_with_their_positions(
    polar_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {bytes([value]): value for value in range(256)} | {b"He": 256}
    encoding = tiktoken.Encoding("small", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "encoding_for_model", lambda model: encoding)
    api = PROVIDERS["openai"]()
    api.script(Scripted("Hey"))
    with running(api):
        serve_one_call(api, "openai")
    call_id = polar_json("show", "last")["calls"][0]["call_id"]
    assert polar_json("show", call_id, "--tokens")["choices"][0]["token_texts"] == ["He", "y"]
    assert polar_ok("show", call_id, "--tokens").rstrip().endswith('0 "He"\n2 "y"')


@providers
def test_doctor_names_the_model_and_its_price(polar_home: Path, provider: str) -> None:
    api = PROVIDERS[provider]()
    with running(api):
        options = ("--engine", provider, "--engine-url", api.url, "--model", api.model)
        checks = {check["name"]: check for check in polar_json("doctor", *options)["checks"]}
        assert checks["engine"]["state"] == checks["price"]["state"] == "ok"
        assert "continue mode" not in checks
        assert "USD for a million prompt tokens" in checks["price"]["detail"]
        api.model = "unheard-of"
        checks = {check["name"]: check for check in polar_json("doctor", *options[:-1], api.model)["checks"]}
        assert (checks["price"]["state"], "gateway.prices" in checks["price"]["fix"]) == ("note", True)


def test_a_hosted_engine_needs_a_model(polar_home: Path) -> None:
    assert "--model" in polar_error("serve", "--engine", "anthropic")
