"""Several of vLLM's parsers fit a server's answers: which of them is chosen.

The server and the parsers are scripted, except in the last test, which has vLLM's own parsers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._families.families import Family
from benchmarks._families.random_models import save_model
from benchmarks._families.template_engine import TemplateEngine
from polar_proxy.engines.base import CannotContinueError
from polar_proxy.engines.chat_template import ModelFiles
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.engines.vllm.answer_parser import parser_request
from polar_proxy.engines.vllm.parser_process import ParsedStream, ParserProcess, Parsers
from polar_proxy.engines.vllm.parser_proof import ParserProofs
from polar_proxy.engines.vllm.target_answers import TOOL
from polar_proxy.types import ChatRequest, Json
from tests.engines.vllm_environment import vllm_python
from tests.fakes.vllm_server import END, FakeVllm, tokenized

pytestmark = pytest.mark.slow

RIGHT, ALIKE, OTHER = ("xml", "r1"), ("xml", "r2"), ("xml2", None)
TELLING = tokenized("C:\\new")
"""An answer on which OTHER differs from the server's parsers."""


class ScriptedParsers(ParserProcess):
    """RIGHT and ALIKE parse like the server, OTHER does not parse TELLING like it."""

    pairs: tuple[Parsers, ...] = (RIGHT, ALIKE, OTHER)

    def __init__(self, *, telling: Sequence[int]) -> None:
        super().__init__("python", "model")
        self._telling = list(telling)
        """What is found to distinguish OTHER from the rest."""
        self.rounds = 0
        self.with_grammar: Parsers | None = RIGHT
        """The pair that samples answers with tools under a grammar."""

    async def ensure_started(self) -> None:
        pass

    async def open(self, parsers: Parsers, request: Json, prompt: Sequence[int]) -> ParsedStream:
        stream = ParsedStream(self, 0, self.starts)
        under_grammar = bool(request.get("tools")) and parsers == self.with_grammar
        stream.sampling = {"special": True, "constraint": {"structural_tag": "..."} if under_grammar else None}
        return stream

    async def match(
        self, request: Json, samples: Sequence[Json], parsers: Sequence[Parsers] | None = None
    ) -> list[Parsers]:
        told = any(list(sample["ids"]) == [*TELLING, END] for sample in samples)
        return [pair for pair in parsers or self.pairs if not (told and pair == OTHER)]

    async def distinguish(
        self, request: Json, prompts: Sequence[Sequence[int]], answers: Json, parsers: Sequence[Parsers], seed: int
    ) -> list[tuple[int, list[int]]]:
        self.rounds += 1
        assert len(prompts) == 2, "a first answer, and one after a tool call"
        assert answers["stop"] == END
        assert tuple(tokenized("Hello there.")) in answers["bodies"]
        return [(1, self._telling)] if OTHER in parsers else []


async def chosen(process: ParserProcess, given: Parsers | None = None) -> Parsers:
    async with FakeVllm(quirks=frozenset({"other_form"})) as fake, VllmEngine(fake.url) as engine:
        proofs = ParserProofs(engine.client, end_of_turn=END, tools=True, process=process, parsers=given)
        return (await proofs.prove({})).parsers


async def test_the_server_samples_an_answer_on_which_the_parsers_differ() -> None:
    process = ScriptedParsers(telling=TELLING)
    assert await chosen(process) == RIGHT
    assert process.rounds == 2, "RIGHT and ALIKE were compared once more, without a difference"


async def test_of_parsers_that_parse_alike_one_with_a_grammar_is_chosen() -> None:
    """Otherwise answers sampled under a grammar might be trained as free ones."""
    process = ScriptedParsers(telling=TELLING)
    process.with_grammar = ALIKE
    assert await chosen(process) == ALIKE
    process.with_grammar = None
    assert await chosen(process) == RIGHT


async def test_parsers_are_named_if_the_server_never_shows_a_difference() -> None:
    process = ScriptedParsers(telling=tokenized("something else"))
    with pytest.raises(CannotContinueError, match=r"xml/r1, xml/r2, xml2/\).*engine\.vllm_parsers"):
        await chosen(process)
    assert process.rounds == 4


class ManyParsers(ScriptedParsers):
    """The server's answers rule out one pair of parsers at a time."""

    pairs = (RIGHT, ALIKE, *((f"xml{number}", None) for number in range(2, 9)))

    async def match(
        self, request: Json, samples: Sequence[Json], parsers: Sequence[Parsers] | None = None
    ) -> list[Parsers]:
        return list(self.pairs if parsers is None else parsers[:-1])

    async def distinguish(
        self, request: Json, prompts: Sequence[Sequence[int]], answers: Json, parsers: Sequence[Parsers], seed: int
    ) -> list[tuple[int, list[int]]]:
        self.rounds += 1
        return [(1, self._telling)] if len(parsers) > 2 else []


async def test_the_server_is_asked_as_long_as_its_answers_rule_out_parsers() -> None:
    process = ManyParsers(telling=TELLING)
    assert await chosen(process) == RIGHT
    assert process.rounds == len(process.pairs) - 1


async def test_no_parsers_are_chosen_if_no_call_in_the_models_form_was_sampled() -> None:
    """All of them may read the texts without calls alike."""
    async with FakeVllm(quirks=frozenset({"other_form", "no_choice"})) as fake, VllmEngine(fake.url) as engine:
        process = ScriptedParsers(telling=TELLING)
        with pytest.raises(CannotContinueError, match=r"made to sample a tool call.*engine\.vllm_parsers"):
            await ParserProofs(engine.client, end_of_turn=END, tools=True, process=process).prove({})
        named = ParserProofs(engine.client, end_of_turn=END, tools=True, process=process, parsers=RIGHT)
        assert (await named.prove({})).parsers == RIGHT


async def test_parsers_are_chosen_by_the_calls_of_the_servers_own_grammar() -> None:
    """vLLM's parser for GLM 4.7 replaces a given grammar by one for tool calls."""
    quirks = frozenset({"other_form", "own_grammar"})
    async with FakeVllm(quirks=quirks) as fake, VllmEngine(fake.url) as engine:
        process = ScriptedParsers(telling=TELLING)
        process.pairs = (RIGHT,)
        assert (
            await ParserProofs(engine.client, end_of_turn=END, tools=True, process=process).prove({})
        ).parsers == RIGHT


@pytest.mark.parametrize("quirk", ["own_grammar", "free_with_tools", "no_choice", "reasons_first"])
async def test_answers_under_the_servers_own_grammar_count_as_constrained_if_its_parser_is_unknown(quirk: str) -> None:
    quirks = frozenset({"other_form", quirk})
    async with FakeVllm(quirks=quirks) as fake, VllmEngine(fake.url) as engine:
        proofs = ParserProofs(engine.client, end_of_turn=END, tools=True)
        with pytest.raises(CannotContinueError, match="vLLM's package was not found"):
            await proofs.prove({})
        asked = ChatRequest("", (), tools=(TOOL,))
        assert engine.continue_problem is not None
        assert await proofs.constrains(asked) == (quirk == "own_grammar"), "it samples a call in place of a given text"
        assert await engine.constrains(asked) == (quirk in ("own_grammar", "free_with_tools"))
        assert not await engine.constrains(replace(asked, tools=()))


async def test_given_parsers_are_not_compared_with_others() -> None:
    process = ScriptedParsers(telling=TELLING)
    assert await chosen(process, OTHER) == OTHER
    assert process.rounds == 0


async def test_knows_whether_the_chat_route_samples_under_a_grammar_of_the_parser() -> None:
    async with FakeVllm(quirks=frozenset({"other_form"})) as fake, VllmEngine(fake.url) as engine:
        proofs = ParserProofs(engine.client, end_of_turn=END, tools=True, process=ScriptedParsers(telling=TELLING))
        asked = ChatRequest("", (), tools=(TOOL,))
        assert not await proofs.constrains(asked), "the parser is not known yet"
        await proofs.prove({})
        assert await proofs.constrains(asked)
        assert not await proofs.constrains(replace(asked, tools=()))
        # The server's parsers are the same under all template options.
        assert await proofs.constrains(replace(asked, template_kwargs={"enable_thinking": False}))


@pytest.mark.parametrize(("with_grammar", "enforced"), [(RIGHT, True), (None, False)])
async def test_knows_whether_a_demanded_call_is_enforced(with_grammar: Parsers | None, enforced: bool) -> None:
    """vLLM's parser for Gemma 4 has no grammar, so the model may answer without the call that was demanded."""
    async with FakeVllm(quirks=frozenset({"other_form"})) as fake, VllmEngine(fake.url) as engine:
        process = ScriptedParsers(telling=TELLING)
        process.with_grammar = with_grammar
        process.pairs = (RIGHT,)
        proofs = ParserProofs(engine.client, end_of_turn=END, tools=True, process=process)
        assert await proofs.enforces_calls(), "the parser is not known yet"
        await proofs.prove({})
        assert await proofs.enforces_calls() == enforced


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_real_parsers_are_matched_in_the_chunks_of_the_servers_stream(tmp_path: Path) -> None:
    """vLLM's parser for Llama 3 loses a call that comes in one piece, as its chat route does then."""
    renderer = TemplateEngine(Family("llama", "<|python_tag|>{{ messages[0].content }}", ("<|eot_id|>",), ""))
    await asyncio.to_thread(save_model, tmp_path, renderer, "qwen3")
    request = parser_request("m", ChatRequest("", (), tools=(TOOL,)))
    ids = [*renderer.encode_text('{"name": "look", "parameters": {"path": "a"}}'), renderer.stop_ids[0]]
    called = {"calls": [["look", '{"path": "a"}']], "finish": "tool_calls"}
    lost = {"calls": [], "finish": "stop"}
    async with ParserProcess(vllm_python(), str(tmp_path)) as process:

        async def fits(chunks: list[int], read: Json) -> bool:
            answer = {
                "prompt": [1],
                "ids": ids,
                "raw_finish": "stop",
                "contains_call": True,
                "text": "",
                "reasoning": "",
            }
            return bool(await process.match(request, [{**answer, **read, "chunks": chunks}], [("llama3_json", None)]))

        assert [await fits([1] * len(ids), read) for read in (called, lost)] == [True, False]
        assert [await fits([len(ids)], read) for read in (called, lost)] == [False, True]


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_finds_answers_that_real_parsers_do_not_parse_alike() -> None:
    files = ModelFiles.load(POLAR_TINY)
    texts = ['<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>', "Z</think>Hello there."]
    answers = {"start": [], "bodies": [files.encode(text) for text in texts], "stop": min(files.stop_ids)}
    request = parser_request("m", ChatRequest("", (), tools=(TOOL,)))
    async with ParserProcess(vllm_python(), str(POLAR_TINY)) as process:
        alike = [("qwen3_xml", "qwen3"), ("qwen3_coder", "qwen3")]
        assert await process.distinguish(request, [[1]], answers, alike, 0) == []
        unlike = [*alike, ("hermes", "qwen3"), ("hermes", None)]
        found = await process.distinguish(request, [[1]], answers, unlike, 0)
        assert found
        assert found == await process.distinguish(request, [[1]], answers, unlike, 0)
        assert found != await process.distinguish(request, [[1]], answers, unlike, 1)
