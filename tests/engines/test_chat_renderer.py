"""A vLLM server whose chats are not rendered by its template: vLLM's renderer in the side process renders for Polar."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.engines.vllm.client import CHAT, render_body
from tests.engines.engine_contract import WEATHER, chat, run
from tests.fakes.vllm_server import END, Answer, FakeVllm, text_of

pytestmark = pytest.mark.slow

QUIRKS = frozenset({"chat_library"})
# In place of the Python with vLLM: it renders as the fake server's chat route.
WORKER = f"""#!{sys.executable}
import json, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.fakes.vllm_server import END, FakeVllm, text_of
fake = FakeVllm(quirks=frozenset(QUIRKS))
print(json.dumps({{"version": "0", "stop_ids": [END], "reasoning_tags": []}}), flush=True)
for line in sys.stdin:
    renderings = [fake.prompt("{CHAT}", body) for body in json.loads(line)["requests"]]
    print(json.dumps({{"renderings": [[ids, text_of(ids)] for ids in renderings]}}), flush=True)
"""


@pytest.fixture
def python(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    path = tmp_path / "python"
    path.write_text(WORKER.replace("QUIRKS", repr(request.param)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("python", [list(QUIRKS)], indirect=True)
async def test_conversations_are_rendered_by_the_side_process(python: str) -> None:
    async with FakeVllm(quirks=QUIRKS) as fake, VllmEngine(fake.url, vllm_python=python) as engine:
        assert engine.continue_problem is None
        assert engine.info.eos_token_ids == (END,)
        request = chat(tools=(WEATHER,))
        ids = await engine.render(request)
        assert ids == fake.prompt(CHAT, {"model": "fake", **render_body(request)})
        assert await engine.render_texts([request]) == [text_of(ids)]
        assert await engine.confirm_rendering(request, ids[-3:])
        fake.script(Answer("Hello."))
        answer = await run(engine, request, prompt=ids)
        assert list(answer.prompt_ids) == ids


@pytest.mark.parametrize("python", [[*QUIRKS, "other_form"]], indirect=True)
async def test_the_side_process_ends_with_the_engine_if_no_parser_fits(python: str) -> None:
    quirks = QUIRKS | {"other_form"}
    async with FakeVllm(quirks=quirks) as fake, VllmEngine(fake.url, vllm_python=python) as engine:
        assert engine.continue_problem is not None
        assert await engine.render(chat())
        renderer = engine.client.renderer
        assert renderer is not None
    assert renderer._process is None


@pytest.mark.parametrize("python", [[]], indirect=True)
async def test_a_side_process_that_renders_otherwise_is_not_used(python: str) -> None:
    async with FakeVllm(quirks=QUIRKS) as fake, VllmEngine(fake.url, vllm_python=python) as engine:
        assert "does not render conversations as its chat route does." in str(engine.continue_problem)
        assert engine.client.renderer is None


async def test_a_side_process_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    async with FakeVllm(quirks=QUIRKS) as fake, VllmEngine(fake.url, vllm_python=str(tmp_path / "none")) as engine:
        assert "as its chat route does. vLLM's parsers cannot be started with" in str(engine.continue_problem)


async def test_without_vllm_the_remedy_is_named() -> None:
    async with FakeVllm(quirks=QUIRKS) as fake, VllmEngine(fake.url) as engine:
        assert "does not render conversations as its chat route does. Install vLLM on this" in str(
            engine.continue_problem
        )
