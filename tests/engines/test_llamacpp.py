"""The llama.cpp engine against a fake server: the contracts, its probe, tokens within a character, cancellation."""

from __future__ import annotations

import math
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from polar_proxy.engines.llamacpp import LlamaCppEngine
from polar_proxy.engines.openai_stream import UNKNOWN_ID
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import Sampling
from tests.engines.continuation_contract import ContinuationContract
from tests.engines.engine_contract import PLAIN, WEATHER, AbortContract, Answer, EngineContract, chat, gather, run
from tests.fakes.engine_server import Fault
from tests.fakes.llama_server import FakeLlama, raw_logprobs, sampled_logprobs
from tests.fakes.vllm_folder import write_model_folder
from tests.fakes.vllm_server import END, ids
from tests.until import until

SCRIPT = Path(__file__).parents[2] / "scripts" / "llama_server.sh"

TOOLS = {"tools": (WEATHER,)}


@pytest.fixture
async def engine() -> AsyncIterator[LlamaCppEngine]:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as entered:
        yield entered


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("fake-llama"))


async def sampled(engine: LlamaCppEngine, sampling: Sampling) -> Answer:
    """Return an answer that may have unknown tokens."""
    answer = Answer()
    async for event in engine.sample(chat(sampling=sampling)):
        answer.text += event.text
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        answer.finish_reason = event.finish_reason
    assert [token == UNKNOWN_ID for token in answer.token_ids] == [math.isnan(value) for value in answer.logprobs]
    return answer


class TestContract(EngineContract):
    tail_may_be_lost = True


class TestContinuation(ContinuationContract):
    pass


async def test_probe_finds_capabilities(engine: LlamaCppEngine) -> None:
    info = engine.info
    assert (info.engine, info.version, info.model) == ("llamacpp", "b1-fake", "fake.gguf")
    assert (info.context_length, info.logprob_mode, info.precision) == (4096, "processed", "all F32")
    assert info.eos_token_ids == (END,)
    assert info.capabilities == {"token_ids", "logprobs", "token_prompt", "score", "continue", "tools"}
    assert engine.continue_problem is None


@pytest.mark.parametrize(
    ("quirk", "message"),
    [
        ("ollama", r"is Ollama 0\.9\.0, whose API returns no token ids.*--engine openai --engine-url http"),
        ("no_ids", "returns no token ids.*Update llama.cpp"),
        ("no_probs", "without their log-probabilities.*draft model"),
        ("no_settings", "ignores the settings samplers"),
        ("two_ids", "sent two ids for one token"),
        ("raw_only", "returns raw log-probabilities for `post_sampling_probs: true`"),
        ("chat_differs", "gives the chat route a prompt of"),
    ],
)
async def test_rejects_a_server_whose_answers_cannot_be_recorded(quirk: str, message: str) -> None:
    async with FakeLlama(quirks=frozenset({quirk})) as fake:
        with pytest.raises(EngineError, match=message):
            async with LlamaCppEngine(fake.url):
                pass


async def test_unknown_model_error_names_the_served_one() -> None:
    async with FakeLlama() as fake:
        with pytest.raises(EngineError, match=r"does not serve 'qwen'\. It serves: fake\.gguf\."):
            async with LlamaCppEngine(fake.url, model="qwen"):
                pass


async def test_calls_in_another_form_are_refused_with_the_reason() -> None:
    async with FakeLlama(quirks=frozenset({"other_form"})) as fake, LlamaCppEngine(fake.url) as engine:
        assert "tools" not in engine.info.capabilities
        assert "another format than Hermes" in str(engine.continue_problem)
        with pytest.raises(RequestError, match="cannot read this model's tool calls") as caught:
            await run(engine, chat(**TOOLS))
        assert caught.value.param == "tools"
        assert (await run(engine, chat())).choices[0].token_ids


async def test_no_default_of_the_server_has_an_effect() -> None:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        fake.bodies.clear()
        await run(engine, chat(sampling=Sampling(max_tokens=3)))
        await run(engine, chat(sampling=Sampling(max_tokens=3, temperature=0.0)))
        await run(engine, chat(sampling=Sampling(max_tokens=3, top_p=0.9, min_p=0.1, top_k=5, repetition_penalty=1.1)))
        free, greedy, cut = fake.bodies
        neutral = {"min_p": 0.0, "top_k": 0, "top_p": 1.0, "repeat_penalty": 1.0, "mirostat": 0, "temperature": 1.0}
        assert {name: free[name] for name in neutral} == neutral
        assert free["samplers"] == ["temperature", "min_p", "top_k", "top_p"]
        assert (greedy["samplers"], greedy["top_k"], greedy["post_sampling_probs"]) == (["top_k"], 1, False)
        assert cut["samplers"] == ["penalties", "temperature", "min_p", "top_k", "top_p"]
        assert (cut["top_p"], cut["min_p"], cut["top_k"], cut["repeat_penalty"]) == (0.9, 0.1, 5, 1.1)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(presence_penalty=0.5), "presence_penalty"),
        (Sampling(frequency_penalty=-0.5), "frequency_penalty"),
        (Sampling(temperature=-1.0), "temperature"),
        (Sampling(max_tokens=0), "max_tokens"),
        (Sampling(logit_bias={"a": 1.0}), "logit_bias"),
        (Sampling(logit_bias={"100000": 1.0}), "logit_bias"),
    ],
)
async def test_refuses_what_the_server_would_do_otherwise(
    engine: LlamaCppEngine, sampling: Sampling, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await run(engine, chat(sampling=sampling))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_tokens_within_a_character_are_found_with_their_logprobs(temperature: float) -> None:
    """Each character takes several tokens, of which the stream shows only the last."""
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        fake.bodies.clear()
        fake.script("é and 漢字, 🙂!")
        result = await run(engine, chat(sampling=Sampling(temperature=temperature)))
        answer = result.choices[0]
        assert (answer.text, answer.finish_reason) == ("é and 漢字, 🙂!", "stop")
        assert answer.token_ids == [*ids("é and 漢字, 🙂!"), END]
        sequence = [result.prompt_ids[-1], *answer.token_ids]
        body = {"samplers": ["temperature"], "temperature": temperature or 1.0}
        assert answer.logprobs == pytest.approx([sampled_logprobs(a, body)[b] for a, b in pairwise(sequence)])
        assert len(fake.bodies) == 5  # sampled on after each of the four characters


async def test_missing_tokens_with_several_spellings_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        monkeypatch.setattr(engine.model.vocabulary, "spellings", lambda text, count: [[7], [8]])
        fake.bodies.clear()
        fake.script("aéb")
        answer = await sampled(engine, Sampling())
        assert (answer.text, len(fake.bodies)) == ("aéb", 1)
        assert answer.token_ids == [*ids("a"), UNKNOWN_ID, *ids("é")[1:], *ids("b"), END]


async def test_an_answer_that_ends_within_a_character_is_unknown_there() -> None:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        fake.script("ab漢")
        answer = await sampled(engine, Sampling(max_tokens=4))
        assert (answer.token_ids, answer.finish_reason) == ([*ids("ab"), UNKNOWN_ID, UNKNOWN_ID], "length")
        assert answer.text == "ab"


async def test_max_tokens_counts_across_a_gap() -> None:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        for limit in (3, 4):
            fake.script("aébcd")
            answer = (await run(engine, chat(sampling=Sampling(max_tokens=limit)))).choices[0]
            assert (answer.token_ids, answer.finish_reason) == (ids("aébcd")[:limit], "length")


async def test_an_invalid_byte_is_not_taken_for_the_replacement_character() -> None:
    """JSON shows U+FFFD in place of a byte that is no character."""
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        broken = [ids("é")[0], *ids("ab"), END]
        fake.script(broken)
        answer = await sampled(engine, Sampling())
        assert answer.token_ids == [UNKNOWN_ID, *broken[1:]]


class TestAbort(AbortContract):
    @pytest.fixture
    async def generating(self) -> AsyncIterator[tuple[FakeLlama, LlamaCppEngine]]:
        async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
            fake.script("x" * 500)
            fake.delay = 0.05
            yield fake, engine


async def test_a_stop_string_ends_the_generation_at_the_server() -> None:
    async with FakeLlama(delay=0.01) as fake, LlamaCppEngine(fake.url) as engine:
        fake.script("one STOP" + "x" * 500)
        answer = (await run(engine, chat(sampling=Sampling(stop=("STOP",))))).choices[0]
        assert (answer.text, answer.stop_sequence, answer.token_ids) == ("one ", "STOP", ids("one STOP"))
        await until(lambda: fake.aborted)


@pytest.mark.parametrize(("fault", "kind"), [(Fault(400, "bad"), RequestError), (Fault(503, "loading"), EngineError)])
async def test_errors_of_the_server_are_typed(fault: Fault, kind: type[Exception]) -> None:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        fake.script(fault)
        with pytest.raises(kind, match=fault.message):
            await run(engine, chat())


async def test_an_id_that_differs_from_the_one_beside_the_logprob_is_an_error() -> None:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        fake.quirks = frozenset({"two_ids"})
        with pytest.raises(EngineError, match="sent two ids for one token"):
            await run(engine, chat())


async def test_reads_a_tool_call(engine: LlamaCppEngine) -> None:
    async with FakeLlama() as fake, LlamaCppEngine(fake.url) as engine:
        fake.script('I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>')
        answer = (await run(engine, chat(sampling=Sampling(), **TOOLS))).choices[0]
        assert (answer.text, answer.names, answer.finish_reason) == ("I look.", {0: "get_weather"}, "tool_calls")
        assert answer.arguments == {0: '{"city": "Zürich"}'}
        assert UNKNOWN_ID not in answer.token_ids


async def test_choices_are_requests_of_their_own(engine: LlamaCppEngine) -> None:
    """More than the server has slots."""
    request = chat(sampling=replace(PLAIN, n=6, seed=3, max_tokens=8))
    events = [event async for event in engine.sample(request)]
    result = gather(events)
    assert len({tuple(answer.token_ids) for answer in result.choices}) > 1
    assert sum(event.prompt_ids is not None for event in events) == 1


async def test_score_knows_tokens_within_a_character(engine: LlamaCppEngine) -> None:
    sequence = ids("abé")
    found = await engine.score(sequence)
    assert found == pytest.approx([raw_logprobs(a)[b] for a, b in pairwise(sequence)])


@pytest.mark.parametrize(("flags", "alias"), [((), "Small-Q4"), (("--alias", "mine"), "mine")])
def test_the_script_serves_a_file_under_its_own_name(tmp_path: Path, flags: tuple[str, ...], alias: str) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    command = [SCRIPT, "serve", tmp_path, tmp_path / "Small-Q4.gguf", "8080", *flags]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    names = [value for name, value in pairwise(words) if name == "--alias"]
    assert names[-1] == alias, "llama-server uses the last one"
