"""A call leaves no reference cycles, so its memory is free at once, and the garbage collector has little to do."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from unittest.mock import patch

import pytest

from polar_proxy.engines.vllm import VllmEngine
from tests.conftest import Serve
from tests.fakes.engine_server import Fault
from tests.fakes.vllm_folder import write_model_folder
from tests.fakes.vllm_server import Answer, FakeVllm
from tests.gateway.agents import client

USER = [{"role": "user", "content": "list the files"}]
BASH = {"type": "object", "properties": {"command": {"type": "string"}}}
REQUESTS = {
    "/v1/chat/completions": {
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": BASH}}],
    },
    "/v1/responses": {"input": USER, "tools": [{"type": "function", "name": "bash", "parameters": BASH}]},
    "/v1/messages": {"messages": USER, "max_tokens": 99, "tools": [{"name": "bash", "input_schema": BASH}]},
    "/v1/completions": {"prompt": "list the files"},
}
CALL = Answer(text="I look. ", tool_calls=(("bash", '{"command": "ls"}'),))
ANSWERS = {
    "whole": CALL,
    "error": Fault(status=500),
    "dropped": Fault(status=None),
    "cut": Answer(drop_after=2),
    "not JSON": Answer(garbage_after=1),
}


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Exclude the objects of earlier tests from garbage collection, and no others.

    A gateway would also exclude those of its start, among them its first connections to the engine.
    """
    gc.collect()
    gc.freeze()
    with patch.object(gc, "freeze"):
        yield


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running until the test asks for it."""
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def cyclic_garbage() -> Counter[str]:
    """Collect the garbage, and count what is of Polar: objects by class, and frames by function."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    names = [
        one.f_code.co_filename + ":" + one.f_code.co_name
        if isinstance(one, FrameType)
        else f"{type(one).__module__}.{type(one).__qualname__}"
        for one in gc.garbage
    ]
    return Counter(name for name in names if "polar_proxy" in name)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With the model's folder, Polar renders the prompts and parses the answers itself."""
    return str(write_model_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_call_leaves_no_cycles(
    serve: Serve, no_collection: None, model_folder: str, path: str, answer: str, stream: bool
) -> None:
    fake = FakeVllm(default=CALL, context_length=1 << 20, folder=model_folder)
    async with fake, serve(VllmEngine(fake.url), retry_window_seconds=0) as gateway, client(gateway.url) as http:
        gc.collect()
        fake.script(*[ANSWERS[answer]] * 2)
        await http.post(gateway.url + path, json={"model": "m", "stream": stream, **REQUESTS[path]})
        await tasks_ended()
        assert cyclic_garbage() == {}


async def tasks_ended() -> None:
    """Return once no task has ended for 50 ms."""
    before, now = 0, len(asyncio.all_tasks())
    while now != before:
        await asyncio.sleep(0.05)
        before, now = now, len(asyncio.all_tasks())
