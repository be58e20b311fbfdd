"""`polar intercept` as a user starts it, with the real mitmproxy."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from harness_adapters.base import Installation
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.store import Store
from tests.cli.process import POLAR, environment
from tests.cli.runner import polar_error
from tests.conftest import Serve
from tests.gateway.agents import CHAT, recorded_calls


async def intercept(gateway: str, mitmproxy: Installation, *arguments: str) -> tuple[int, str, str]:
    cache = os.environ.get("POLAR_CACHE_DIR") or str(mitmproxy.root.parent.parent)
    process = await asyncio.create_subprocess_exec(
        *(POLAR, "intercept", "--url", gateway, "--key", "my-run", *arguments),
        env={**environment(), "POLAR_HARNESSES": cache},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


@pytest.mark.full
async def test_a_program_is_answered_and_its_exit_code_is_kept(
    serve: Serve, store: Store, mitmproxy: Installation, polar_home: Path
) -> None:
    program = (
        f"curl -sS -d '{json.dumps(CHAT)}' https://openrouter.ai/api/v1/chat/completions; "
        "curl -s https://other.invalid/; exit 7"
    )
    async with serve(ScriptedEngine(lambda request: "from Polar")) as gateway:
        code, out, error = await intercept(gateway.url, mitmproxy, "--others", "list", "--", "sh", "-c", program)
    assert (code, json.loads(out)["choices"][0]["message"]["content"]) == (7, "from Polar")
    assert "other hosts: other.invalid" in error
    assert [call.status for call in await recorded_calls(store, 1)] == ["ok"]


@pytest.mark.full
async def test_a_program_that_pins_certificates_is_named_with_what_to_do(
    serve: Serve, mitmproxy: Installation, polar_home: Path
) -> None:
    pin = ("--pinnedpubkey", "sha256//" + "A" * 43 + "=")
    async with serve(ScriptedEngine()) as gateway:
        url = "https://api.anthropic.com/v1/messages"
        _, _, error = await intercept(gateway.url, mitmproxy, "--", "curl", *pin, "-d", "{}", url)
    text = " ".join(error.split())
    assert "curl did not accept Polar's certificate for api.anthropic.com" in text
    assert "Look for a setting of curl that names certificates or the endpoint" in text


def test_mistakes_are_explained(polar_home: Path) -> None:
    assert "There is no program 'no-such-agent' on PATH" in polar_error("intercept", "--", "no-such-agent")
    assert "There is no others 'drop'" in polar_error("intercept", "--others", "drop", "--", "true")
