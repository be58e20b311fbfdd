"""The local engine: the two contracts, and its own promises."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.local import LocalEngine
from polar_proxy.engines.local.model import PrefixCache
from polar_proxy.engines.local.scheduler import BatchScheduler
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, Message, Sampling, TextRequest, TokenIds
from tests.engines.conftest import make_random_model
from tests.engines.continuation_contract import ContinuationContract
from tests.engines.engine_contract import PLAIN, WEATHER, EngineContract, Result, chat, run
from tests.loop_watch import watched
from tests.until import GUARD_SECONDS, until

pytestmark = pytest.mark.slow


@pytest.fixture(params=["random", "polar-tiny"], scope="module")
def model_dir(request: pytest.FixtureRequest, random_model_dir: Path) -> Path:
    if request.param == "random":
        return random_model_dir
    if not (POLAR_TINY / "model.safetensors").is_file():
        pytest.skip("polar-tiny's weights are not in the package: examples/tiny_policy makes them")
    return POLAR_TINY


@pytest.fixture
async def engine(model_dir: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(model_dir) as local:
        yield local


@pytest.fixture
async def random_engine(random_model_dir: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(random_model_dir, name="random", max_batch=4) as local:
        yield local


async def test_an_answer_ends_at_the_engines_own_limit(random_model_dir: Path) -> None:
    request = TextRequest("random", [5, 6, 7], Sampling(temperature=1.0, max_tokens=100, seed=1))
    async with LocalEngine(random_model_dir, max_answer=3) as engine:
        events = [event async for event in engine.sample(request)]
    assert sum(len(event.token_ids) for event in events) <= 3
    assert events[-1].finish_reason in ("length", "stop")


class TestContract(EngineContract):
    pass


class TestContinuation(ContinuationContract):
    pass


def endless(engine: LocalEngine) -> Sampling:
    """Return sampling that does not end by itself, because it excludes end-of-turn tokens."""
    return replace(PLAIN, max_tokens=3000, logit_bias={str(eos): -100.0 for eos in engine.info.eos_token_ids})


def ignore_eos(engine: LocalEngine) -> None:
    """Let answers run to max_tokens without a bias, so that their log-probabilities are the raw ones."""
    engine.loaded.scheduler.end_ids = frozenset()


async def assert_exact(engine: LocalEngine, result: Result) -> None:
    for answer in result.choices:
        fresh = (await engine.score([*result.prompt_ids, *answer.token_ids]))[len(result.prompt_ids) - 1 :]
        assert answer.logprobs == pytest.approx(fresh, abs=1e-3)


def prefilled(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the sizes of all later prompt chunks are appended."""
    runner, sizes = engine.loaded.runner, []
    extend = runner.extend

    def counting(row: Any, token_ids: Sequence[int], start: int, **options: Any) -> torch.Tensor:
        sizes.append(len(token_ids))
        return extend(row, token_ids, start, **options)

    monkeypatch.setattr(runner, "extend", counting)
    return sizes


async def until_idle(engine: LocalEngine) -> None:
    worker = engine.loaded.scheduler
    await until(lambda: not worker.unfinished, "the worker's rest")


class Steps:
    """Count the engine's decoding steps; `before(number)` is called on the worker before each, and may block it."""

    def __init__(self, engine: LocalEngine, before: Callable[[int], None] = lambda number: None) -> None:
        self.count = 0
        runner = engine.loaded.runner
        step = runner.step

        def counting(*given: Any) -> torch.Tensor:
            before(self.count)
            self.count += 1
            return step(*given)

        runner.step = counting  # type: ignore[method-assign]


def hold(happened: Callable[[], object]) -> None:
    """Block the worker until the event loop has done something."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def signalled(scheduler: BatchScheduler, name: str) -> threading.Event:
    """Return an event that is set when a method of the scheduler is called from now on."""
    called = threading.Event()
    method = getattr(scheduler, name)

    def signalling(*given: Any) -> Any:
        called.set()
        return method(*given)

    setattr(scheduler, name, signalling)
    return called


# Exactness


async def test_scores_equal_the_models_own_forward_pass(random_engine: LocalEngine, random_model_dir: Path) -> None:
    ids = [(31 * place) % 990 for place in range(1500)]
    model = AutoModelForCausalLM.from_pretrained(random_model_dir, dtype=torch.float32)
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)[torch.arange(1499), torch.tensor(ids[1:])]
    assert await random_engine.score(ids) == pytest.approx(own.tolist(), abs=1e-4)
    assert await random_engine.score(ids[:1]) == []


async def test_chunked_prefill_is_exact(random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = prefilled(random_engine, monkeypatch)
    ids = tuple((17 * place) % 990 for place in range(3001))
    result = await run(random_engine, TextRequest("", ids, replace(PLAIN, max_tokens=20)))
    assert sum(sizes) == 3000, "all but the last token, which goes through with the decoding steps"
    assert len(sizes) > 2
    await assert_exact(random_engine, result)


async def test_sequences_of_different_lengths_are_exact_in_one_batch(random_engine: LocalEngine) -> None:
    ignore_eos(random_engine)
    requests = [
        TextRequest("", tuple(range(100, 100 + size)), replace(PLAIN, max_tokens=70, n=2, seed=size))
        for size in (5, 40, 47, 48, 79, 300, 850, 990 - 100)
    ]
    for result in await asyncio.gather(*(run(random_engine, request) for request in requests)):
        assert [len(answer.token_ids) for answer in result.choices] == [70, 70]
        await assert_exact(random_engine, result)


async def test_serves_another_architecture(random_model_dir: Path, tmp_path: Path) -> None:
    make_random_model(tmp_path)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=512, initializer_range=0.3, eos_token_id=5, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    async with LocalEngine(tmp_path) as engine:
        await assert_exact(engine, await run(engine, chat(sampling=replace(PLAIN, n=3))))


async def test_rejects_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        await LocalEngine(tmp_path).__aenter__()


# Reuse of keys and values


async def test_next_turn_computes_only_new_tokens(random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await run(
        random_engine, TextRequest("", tuple(range(100, 400)), replace(endless(random_engine), max_tokens=50))
    )
    sizes = prefilled(random_engine, monkeypatch)
    ids = (*first.prompt_ids, *first.choices[0].token_ids, *range(500, 520))
    second = await run(random_engine, TextRequest("", ids, PLAIN))
    assert second.events[0].cached_tokens == 349, "all but the last sampled token, which never went in"
    assert sum(sizes) == 20, "the last sampled token and the new ones, but the last"
    await assert_exact(random_engine, second)


async def test_equal_prompts_are_computed_once(random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = prefilled(random_engine, monkeypatch)
    prompt = tuple(range(100, 500))
    results = await asyncio.gather(
        run(random_engine, TextRequest("", prompt, replace(PLAIN, n=3))),
        run(random_engine, TextRequest("", (*prompt, 7, 8), PLAIN)),
    )
    assert sum(sizes) <= 400 + 2 + 3
    for result in results:
        await assert_exact(random_engine, result)


def ids(tokens: Iterable[int]) -> TokenIds:
    return np.array(list(tokens), dtype=np.int32)


def test_prefix_cache_keeps_one_row_per_session_within_its_limit() -> None:
    def row(length: int) -> torch.Tensor:
        return torch.arange(float(length)).view(1, 1, 1, length, 1).expand(2, 2, 1, length, 4)

    store = PrefixCache(limit_bytes=2 * 2 * 4 * 4 * 100)
    turn = ids(range(30))
    store.keep(turn, row(40))
    store.keep(ids([*range(30), *range(20)]), row(60))
    assert len(store) == 1
    store.keep(turn, row(30))
    assert len(store) == 1, "already covered"
    length, data = store.find(ids([*range(30), 99]))
    assert length == 30
    assert data is not None
    assert data[0, 0, 0, :, 0].tolist() == list(map(float, range(50)))
    store.keep(ids(range(500, 560)), row(60))
    assert len(store) == 1, "60 + 50 tokens are more than 100"
    assert store.find(turn)[0] == 0
    store.keep(ids(range(1000)), row(1000))
    assert store.find(ids(range(1000)))[0] == 0, "larger than the whole store"


# Scheduling, cancellation, failure


async def test_short_prompts_pass_a_long_one(random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short prompt arrives while the first of four chunks of the long one is computed."""
    done: list[str] = []
    worker, runner = random_engine.loaded.scheduler, random_engine.loaded.runner
    begun = threading.Event()
    extend = runner.extend

    def held(*given: Any, **options: Any) -> torch.Tensor:
        if not begun.is_set():
            begun.set()
            hold(lambda: worker.unfinished > 1)
        return extend(*given, **options)

    monkeypatch.setattr(runner, "extend", held)

    async def call(name: str, length: int, tokens: int) -> None:
        ids = tuple(range(100, 100 + length % 800)) * (1 + length // 800)
        await run(random_engine, TextRequest("", ids, replace(endless(random_engine), max_tokens=tokens)))
        done.append(name)

    long = asyncio.create_task(call("long", 799 * 5, 24))
    await until(begun.is_set)
    await asyncio.gather(call("short", 20, 4), long)
    assert done == ["short", "long"]


async def test_serves_more_calls_than_slots(random_engine: LocalEngine) -> None:
    results = await asyncio.gather(*(run(random_engine, chat(f"{n}", sampling=replace(PLAIN, n=2))) for n in range(6)))
    assert [len(result.choices) for result in results] == [2] * 6


async def test_closing_a_call_frees_its_slots(random_engine: LocalEngine) -> None:
    steps = Steps(random_engine)
    for _ in range(3):
        async with aclosing(random_engine.sample(chat(sampling=replace(endless(random_engine), n=4)))) as events:
            async for event in events:
                if event.token_ids:
                    break
        made = steps.count
        await until_idle(random_engine)
        assert steps.count <= made + 1, "the step that was being made"


async def test_drops_calls_cancelled_while_waiting(random_engine: LocalEngine) -> None:
    """Eight calls where four fit, all cancelled before the worker's twelfth step."""
    cancelled = threading.Event()
    steps = Steps(random_engine, lambda number: hold(cancelled.is_set) if number == 10 else None)
    worker = random_engine.loaded.scheduler
    tasks = [asyncio.create_task(run(random_engine, chat(sampling=endless(random_engine)))) for _ in range(8)]
    await until(lambda: steps.count == 10 and worker.unfinished == 8)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    cancelled.set()
    await until_idle(random_engine)
    assert steps.count <= 11


async def test_leaving_the_engine_fails_running_calls(random_model_dir: Path) -> None:
    async with LocalEngine(random_model_dir) as engine:
        worker = engine.loaded.scheduler
        closing = signalled(worker, "close")
        steps = Steps(engine, lambda number: hold(closing.is_set) if number == 10 else None)
        task = asyncio.create_task(run(engine, chat(sampling=endless(engine))))
        await until(lambda: steps.count == 10)
        scoring = asyncio.create_task(engine.score(list(range(900)) * 4))
        await asyncio.sleep(0)
    assert not any(thread.name.startswith("polar-local-engine") for thread in threading.enumerate())
    with pytest.raises(EngineError, match="shut down"):
        await task
    outcome = (await asyncio.gather(scoring, return_exceptions=True))[0]
    assert isinstance(outcome, EngineError | list)
    assert await engine.health() is not None
    with pytest.raises(EngineError, match="shut down"):
        await run(engine, chat())


async def test_failure_of_the_worker_reaches_every_caller(
    random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(random_engine.loaded.runner, "step", broken)
    outcomes = await asyncio.gather(*(run(random_engine, chat()) for _ in range(6)), return_exceptions=True)
    assert all(isinstance(outcome, EngineError) and "out of luck" in str(outcome) for outcome in outcomes)
    assert "out of luck" in (await random_engine.health() or "")
    with pytest.raises(EngineError, match="out of luck"):
        await run(random_engine, chat())
    with pytest.raises(EngineError, match="out of luck"):
        await random_engine.score([1, 2, 3])
    assert "worker failed" in caplog.text


async def test_event_loop_stays_free_while_the_model_works(
    random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop runs callbacks while the model computes, and no callback waits long."""
    loop, runner = asyncio.get_running_loop(), random_engine.loaded.runner
    used: list[str] = []

    def while_it_turns(name: str) -> Callable[..., torch.Tensor]:
        use = getattr(runner, name)

        def using(*given: Any, **options: Any) -> torch.Tensor:
            assert threading.current_thread() is not threading.main_thread()
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(GUARD_SECONDS)
            used.append(name)
            made: torch.Tensor = use(*given, **options)
            return made

        return using

    for name in ("extend", "step"):
        monkeypatch.setattr(runner, name, while_it_turns(name))
    with watched() as watch:
        await run(random_engine, TextRequest("", tuple(range(100, 900)) * 4, replace(PLAIN, n=4, max_tokens=30)))
    assert set(used) == {"extend", "step"}
    assert watch.turns > 10
    assert watch.worst < 0.5


# Requests


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(temperature=-1.0), "temperature"),
        (Sampling(top_p=0.0), "top_p"),
        (Sampling(min_p=2.0), "min_p"),
        (Sampling(max_tokens=0), "max_tokens"),
        (Sampling(n=0), "n"),
        (Sampling(top_logprobs=99), "top_logprobs"),
        (Sampling(logit_bias={"x": 1.0}), "logit_bias"),
        (Sampling(logit_bias={"70000": 1.0}), "logit_bias"),
    ],
)
async def test_rejects_invalid_sampling(random_engine: LocalEngine, sampling: Sampling, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await run(random_engine, chat(sampling=sampling))
    assert caught.value.param == param


async def test_rejects_bad_prompts(random_engine: LocalEngine) -> None:
    for prompt in ((), (5000,), (-1,)):
        with pytest.raises(RequestError):
            await run(random_engine, TextRequest("", prompt, PLAIN))
    with pytest.raises(RequestError, match="Unexpected role"):
        await run(random_engine, ChatRequest("", (Message("user", "a"), Message("clown", "b")), PLAIN))


async def test_max_tokens_is_cut_to_the_context(random_engine: LocalEngine) -> None:
    room = 6
    ids = tuple(range(100, 900)) * 6
    prompt = ids[: random_engine.info.context_length - room]
    for max_tokens in (None, 100_000):
        answer = (
            await run(random_engine, TextRequest("", prompt, replace(endless(random_engine), max_tokens=max_tokens)))
        ).choices[0]
        assert (len(answer.token_ids), answer.finish_reason) == (room, "length")


async def script(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, text: str, *, prompt: ChatRequest) -> Result:
    """Make the model answer `prompt` with exactly `text`, by making each of its tokens certain."""
    runner, tokenizer = engine.loaded.runner, engine.loaded.tokenizer
    tokens = [*tokenizer.encode(text), engine.info.eos_token_ids[0]]
    base = len(await engine.render(prompt))
    assert tokenizer.decode(tokens[:-1]) == text

    def certain(place: int) -> torch.Tensor:
        logits = torch.full((runner.vocab_size,), -30.0)
        logits[tokens[place]] = 30.0
        return logits

    monkeypatch.setattr(runner, "extend", lambda kv, ids, start: None)
    monkeypatch.setattr(runner, "step", lambda kvs, ids, at: torch.stack([certain(place + 1 - base) for place in at]))
    return await run(engine, prompt)


async def test_parses_tool_calls_and_reasoning(random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call>'
    result = await script(random_engine, monkeypatch, text, prompt=chat(tools=(WEATHER,), sampling=Sampling()))
    answer = result.choices[0]
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("", "\nhm\n", "tool_calls")
    assert (answer.names, answer.arguments) == ({0: "get_weather"}, {0: '{"city":"Paris"}'})
    ids = [delta.id for event in result.events for delta in event.tool_calls]
    assert len(ids) == 1
    assert str(ids[0]).startswith("call_")


async def test_tool_calls_are_text_without_tools(random_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'a <tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    request = chat(tools=(WEATHER,), tool_choice="none", sampling=Sampling())
    answer = (await script(random_engine, monkeypatch, text, prompt=request)).choices[0]
    assert (answer.text, answer.names, answer.finish_reason) == (text, {}, "stop")


# Weights


def other_weights(model_dir: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    generator = torch.Generator().manual_seed(9)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }


async def test_loads_weights_between_calls(random_engine: LocalEngine, random_model_dir: Path, tmp_path: Path) -> None:
    ids = list(range(100, 200))
    before = await random_engine.score(ids)
    await run(random_engine, TextRequest("", tuple(ids), PLAIN))
    assert await random_engine.weight_version() == "0"
    await random_engine.load_weights(other_weights(random_model_dir), "7")
    assert await random_engine.weight_version() == "7"
    assert await random_engine.score(ids) != pytest.approx(before, abs=0.01)
    result = await run(random_engine, TextRequest("", tuple(ids), PLAIN))
    assert result.events[0].cached_tokens == 0, "keys of the old weights are forgotten"
    await assert_exact(random_engine, result)
    await random_engine.load_weights(random_model_dir, "8")
    assert await random_engine.score(ids) == pytest.approx(before, abs=1e-5)


async def test_loads_weights_during_an_answer(random_engine: LocalEngine, random_model_dir: Path) -> None:
    weights = other_weights(random_model_dir)
    ignore_eos(random_engine)
    queued = threading.Event()
    steps = Steps(random_engine, lambda number: hold(queued.is_set) if number == 100 else None)
    request = TextRequest("", tuple(range(100, 130)), replace(PLAIN, max_tokens=400))
    task = asyncio.create_task(run(random_engine, request))
    await until(lambda: steps.count == 100)
    loading = asyncio.create_task(random_engine.load_weights(weights, "1"))
    await asyncio.sleep(0)
    queued.set()
    await loading
    result = await task
    answer = result.choices[0]
    assert len(answer.token_ids) == 400
    fresh = (await random_engine.score([*result.prompt_ids, *answer.token_ids]))[29:]
    exact = [abs(one - two) < 1e-3 for one, two in zip(answer.logprobs, fresh, strict=True)]
    switch = exact.index(True) if True in exact else len(exact)
    assert all(exact[-20:]), "tokens sampled after the switch are exact for the new weights, including their past"
    assert 0 < switch < 400


async def test_rejects_weights_of_another_model(random_engine: LocalEngine, random_model_dir: Path) -> None:
    before = await random_engine.score(list(range(50)))
    weights = other_weights(random_model_dir)
    weights["model.norm.weight"] = torch.zeros(3)
    for wrong in (weights, {"a": torch.zeros(1)}):
        with pytest.raises(EngineError, match="not this model's"):
            await random_engine.load_weights(wrong, "x")
    assert await random_engine.weight_version() == "0"
    assert await random_engine.score(list(range(50))) == before
    assert await random_engine.health() is None
