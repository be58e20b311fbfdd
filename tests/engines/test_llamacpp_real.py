"""The engine on a real llama-server that serves polar-tiny (`make test-llama`): contracts, cache, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.llamacpp import LlamaCppEngine
from polar_proxy.types import Message, Sampling, TextRequest
from tests.engines.continuation_contract import ContinuationContract
from tests.engines.engine_contract import PLAIN, WEATHER, EngineContract, chat, run
from tests.engines.llama_environment import serve_llama

pytestmark = [pytest.mark.by_command, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from serve_llama(POLAR_TINY, "--alias", "polar-tiny", "-c", "32768", "-np", "4", "-t", "1")


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return POLAR_TINY


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(url: str) -> AsyncIterator[LlamaCppEngine]:
    async with LlamaCppEngine(url) as llama:
        yield llama


class TestContract(EngineContract):
    tail_may_be_lost = True

    @pytest.fixture(name="special_ids")
    def _special_ids(self, model_dir: Path) -> frozenset[int]:
        """The control tokens: the tokenizer's own list lacks `<|im_start|>`."""
        added = AutoTokenizer.from_pretrained(model_dir).added_tokens_decoder
        return frozenset(token_id for token_id, token in added.items() if token.special)


class TestContinuation(ContinuationContract):
    pass


async def test_probe_finds_what_the_server_has(engine: LlamaCppEngine) -> None:
    info = engine.info
    assert (info.engine, info.model, info.context_length) == ("llamacpp", "polar-tiny", 8192)
    assert info.capabilities == {"token_ids", "logprobs", "token_prompt", "score", "continue", "tools"}
    assert (info.eos_token_ids, info.logprob_mode, info.precision) == ((2,), "processed", "all F32")


async def test_conversations_are_rendered_in_this_process(engine: LlamaCppEngine) -> None:
    request = chat("What is 漢字?", tools=(WEATHER,))
    (here,) = await engine.render_texts([request])
    assert here == await engine.client.apply_template(request)
    assert engine._local is not None
    assert await engine._local.matches_server([request])


async def test_text_becomes_the_ids_of_the_models_own_tokenizer(engine: LlamaCppEngine) -> None:
    """polar-tiny plays its task only from these ids. Numbers have at most three digits, see scripts/gguf_model.py."""
    written = await engine.client.apply_template(chat("Fix it, please: 2 of 128 tests fail.", tools=(WEATHER,)))
    call = '{"command": "sed -i \'12s/a/b/\' a.py\\n\\tcat \\"b.py\\""}'
    text = f"{written}{call}\n        return 100 + x[7]  # größer\n"
    own = AutoTokenizer.from_pretrained(POLAR_TINY)
    assert await engine.encode(text) == own.encode(text, add_special_tokens=False)


def _is_text(data: bytes) -> bool:
    return "\ufffd" not in data.decode(errors="replace")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_logprobs_are_those_of_the_distribution_in_torch(engine: LlamaCppEngine, temperature: float) -> None:
    """A teacher-forced float32 pass of the same weights in Transformers. Parts of characters are not sampled."""
    unfinished = [token for token, data in engine.model.vocabulary.token_bytes.items() if not _is_text(data)]
    assert unfinished
    bias = {str(token): -100.0 for token in unfinished}
    model = AutoModelForCausalLM.from_pretrained(POLAR_TINY, dtype=torch.float32).eval()
    for seed in range(4):
        sampling = replace(PLAIN, max_tokens=100, seed=seed, temperature=temperature, logit_bias=bias)
        result = await run(engine, chat(sampling=sampling))
        answer = result.choices[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*result.prompt_ids, *answer.token_ids]])).logits[0]
            logits[:, unfinished] -= 100.0
        rows = (logits[len(result.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
        fresh = rows[torch.arange(len(answer.token_ids)), torch.tensor(answer.token_ids)]
        assert (fresh - torch.tensor(answer.logprobs)).abs().max().item() < 1e-3


async def test_the_next_turn_finds_the_session_in_the_cache(engine: LlamaCppEngine) -> None:
    request = chat("Say something.", sampling=replace(PLAIN, seed=1))
    first = await run(engine, request)
    answer = first.choices[0]
    more = replace(request, messages=(*request.messages, Message("assistant", answer.text), Message("user", "More.")))
    suffix = (await engine.render(more))[-12:]
    second = await run(engine, more, prompt=[*first.prompt_ids, *answer.token_ids, *suffix])
    cached = second.events[-1].cached_tokens
    assert cached is not None
    assert cached >= len(first.prompt_ids)


async def test_closing_the_stream_stops_the_server(engine: LlamaCppEngine) -> None:
    bias = {str(token): -100.0 for token in engine.info.eos_token_ids}
    request = TextRequest("", "a", replace(PLAIN, max_tokens=7000, logit_bias=bias))
    async with aclosing(engine.sample(request)) as events:
        async for event in events:
            if event.token_ids:
                break
    async with asyncio.timeout(20):
        while any(slot["is_processing"] for slot in await engine.client.json("GET", "/slots")):
            await asyncio.sleep(0.05)


async def test_answers_are_cut_at_the_temperature_and_cuts_that_were_asked_for(engine: LlamaCppEngine) -> None:
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=0.05, max_tokens=20, top_logprobs=5, seed=4)
    result = await run(engine, chat(sampling=sampling))
    for event in result.events:
        for row in event.top:
            assert 1 <= len(row) <= 3
