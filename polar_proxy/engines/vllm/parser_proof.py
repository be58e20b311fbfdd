"""Prove that Polar parses answers as the server's own chat route does: make the server sample given texts, and compare.

The answers are plain text, reasoning, tool calls in the template's own format (`target_answers.py`), Hermes calls,
awkward JSON, ... The chat route's result for each is compared with a parser's result for the same ids. Only a parser
that agreed on all of them is used to continue conversations from exact ids. White space around text and reasoning is
not compared.

These parsers are tried in this order: Polar's Hermes parser; vLLM's parsers in a side process, if its package is found;
the server's parser at `/derender`. Polar's parser is other code than the server's, so it is used only if all of the
given texts were sampled. The other parsers are vLLM's own code and are compared on whatever was sampled. If tool calls
in the template's own format were sampled, the chat route must have parsed at least one of them as a call. Some servers
replace Polar's grammar by their own, and so sample another answer than Polar chose. The calls in that other answer are
compared, too. If no call was sampled, the side process is used only if a setting names the server's parsers.

The server is made to answer both a first message and a tool's result, because some parsers look at the history. If
several of vLLM's parsers fit, they are run on random variations of the answers. The server then samples variations
that these parsers parse differently, until the parsers that are left parse alike.

`forced_sampling.py` makes the server sample a text. A text that was not sampled proves nothing about the Hermes parser.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from polar_proxy.engines.base import CannotContinueError, uses_tools
from polar_proxy.engines.hermes import END_THINK, THINK, HermesParser, Reasoning
from polar_proxy.engines.vllm.answer_parser import (
    DerenderAnswerParser,
    ParserConfig,
    PromptTail,
    has_strict_tool,
    parser_request,
)
from polar_proxy.engines.vllm.client import DERENDER, VllmClient, unless_refused
from polar_proxy.engines.vllm.forced_answers import (
    IN_REASONING,
    PLAIN,
    TAGGED,
    ForcedAnswer,
    ParsedAnswer,
    last_position,
    matching_reasoning_mode,
    unforced,
)
from polar_proxy.engines.vllm.forced_sampling import ForcedSampling, encode_tags
from polar_proxy.engines.vllm.parser_process import ParserProcess, Parsers
from polar_proxy.engines.vllm.target_answers import (
    TOOL,
    USER,
    Conversation,
    TargetAnswer,
    after_call,
    after_reasoning,
    call_turn,
    find_end_of_reasoning,
)
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, SampleEvent, TokenIds

_TAIL_TOKENS = 16
_KEPT_CONFIGS = 32
REMEDY = (
    "Install vLLM on this machine and name its Python by the setting engine.vllm_python, or start vLLM with "
    "--enable-scale-out, so that its own parser can be called."
)
_OWN_GRAMMAR = (
    "The server's chat route samples answers with tools under a grammar that Polar does not know, so these answers are "
    "recorded as constrained, and are not trained. Start vLLM without --tool-strict-level."
)
_PIECES = 8
_ROUNDS = 4
"""Give up after so many rounds in a row without progress. In a round, the server samples answers that the remaining
pairs of parsers parse differently. A round makes progress if it rules out a pair."""


class ParserProofs:
    """Parser configurations of one server. Each set of template options needs its own proof, because the options decide
    whether the model reasons. The proof is made at the first use of the set."""

    def __init__(
        self,
        client: VllmClient,
        *,
        end_of_turn: int,
        tools: bool,
        process: ParserProcess | None = None,
        parsers: Parsers | None = None,
        adds_grammar: bool = False,
    ) -> None:
        """`tools`: whether the server accepts `tool_choice: auto`. `process`: runs vLLM's parsers; None if there is no
        side process. `parsers`: the parsers of the server; None if they are not known. `adds_grammar`: whether the
        server was seen to sample requests with tools under a grammar of its own."""
        self._client = client
        self.process = process
        self._parsers = parsers
        self._end_of_turn = end_of_turn
        self._tools = tools
        self._tags: Mapping[str, tuple[int, ...]] = {}
        self._proved: dict[bytes, ParserConfig | CannotContinueError] = {}
        self.adds_grammar = adds_grammar
        """Whether the server samples requests with tools under a grammar of its own. A proof sets this to True if the
        server samples a tool call although the request's grammar allows only a text."""
        self._lock = asyncio.Lock()

    async def config_for(self, options: Mapping[str, Any], prompt: TokenIds) -> ParserConfig:
        """Return how an answer to `prompt` under these template options is parsed.

        Raises CannotContinueError if no parser was verified for such an answer.
        """
        config = await self.prove(options)
        if config.kind == "hermes" and (tail := self._tail(prompt)) != config.tail:
            raise CannotContinueError(
                f"at the end of this prompt, reasoning is {tail!r}, but Polar's answer parser was verified only for "
                f"prompts where it is {config.tail!r} (open: the answer begins inside reasoning; closed: reasoning has "
                "just ended; none: no reasoning tag is there). Send the messages instead, so that the server renders "
                "the prompt."
            )
        return config

    async def constrains(self, request: ChatRequest) -> bool:
        """Return whether the chat route samples the answer to this request under a grammar of the server's parser.

        If vLLM's parsers run in the side process, the process reports whether they add a grammar. (A server has the
        same parsers under all template options.) If they do not run there, return True for requests with a strict tool,
        and for all requests with tools if the server was seen to add such a grammar.
        """
        for options in (request.template_kwargs, {}):
            config = self._proved.get(_key(options))
            if isinstance(config, ParserConfig) and config.kind == "process":
                return await self._has_grammar(config.parsers, request)
        return uses_tools(request) and (self.adds_grammar or has_strict_tool(request))

    async def enforces_calls(self) -> bool:
        """Return whether a demanded tool call is enforced by a grammar. Also True if vLLM's parsers are not known."""
        config = self._proved.get(_key({}))
        if not isinstance(config, ParserConfig) or config.kind != "process":
            return True
        demanding = ChatRequest("", (), tools=(TOOL,), tool_choice="required")
        return await self._has_grammar(config.parsers, demanding)

    async def prove(self, options: Mapping[str, Any]) -> ParserConfig:
        """Return how this server's answers are parsed under these template options.

        Raises CannotContinueError if no parser can be verified for them.
        """
        key = _key(options)
        if key not in self._proved:
            async with self._lock:
                if key not in self._proved:
                    if len(self._proved) >= _KEPT_CONFIGS:
                        raise CannotContinueError("too many different sets of template options are in use.")
                    self._proved[key] = await self._try_to_prove(options)
        proved = self._proved[key]
        if isinstance(proved, CannotContinueError):
            raise CannotContinueError(proved.reason)
        return proved

    async def _try_to_prove(self, options: Mapping[str, Any]) -> ParserConfig | CannotContinueError:
        try:
            return await self._prove(options)
        except CannotContinueError as error:
            return error
        except RequestError as error:
            return CannotContinueError(f"the server refused a request of its verification: {error}")
        except EngineError as error:
            return CannotContinueError(f"its verification failed: {error}")

    async def _prove(self, options: Mapping[str, Any]) -> ParserConfig:
        self._tags = self._tags or await encode_tags(self._client)
        request = ChatRequest("", (), tools=(TOOL,) if self._tools else (), template_kwargs=options)
        sampling = ForcedSampling(self._client, request, self._tags, end_of_turn=self._end_of_turn)
        toolless = ForcedSampling(self._client, replace(request, tools=()), self._tags, end_of_turn=self._end_of_turn)
        conversations = await self._conversations(sampling)
        first = conversations[0]
        call_problem, short, special = await asyncio.gather(
            self._call_format_problem(sampling),
            asyncio.gather(*map(sampling.short_answer, conversations)),
            asyncio.gather(toolless.special_answer(first), sampling.special_answer(first)),
        )
        reasons = bool(short[0].parsed.reasoning) and not short[0].parsed.text
        texts = await sampling.force_answers(first, reasons)
        self.adds_grammar |= any(answer.parsed.calls for answer in texts if answer.wanted == PLAIN)
        written = await sampling.force_template_answers(conversations)
        answers, tags_show = await sampling.read_back([*texts, *short, *written], first.prompt)
        tail = self._tail(first.prompt)
        mode, problem = self._hermes_mode(answers, reasons, tail, call_problem)
        # A parser needs to see the tags; apart from that, completions hide the same tokens as a chat.
        special_without_tools, special_with_tools = (
            bool(answer.parsed.text or answer.parsed.reasoning) or not tags_show for answer in special
        )
        config = ParserConfig("hermes", mode or "off", self._tools, special_without_tools, special_with_tools, tail)
        if mode is not None and not self.adds_grammar:
            return config
        self._require_recognised_call(answers, problem)
        if not any(answer.parsed.reasoning for answer in answers):
            reasoning = await sampling.open_reasoning(first)
            answers += [] if reasoning is None else [reasoning]
        answers.append(special[-1])
        problems = [problem if mode is None else _OWN_GRAMMAR]
        for find in (self._match_process, self._match_derender):
            found = await find(config, answers, sampling, conversations)
            if isinstance(found, ParserConfig) and not await self._misses_grammar(found, sampling.request):
                return found
            problems.append(found if isinstance(found, str) else _OWN_GRAMMAR)
        raise CannotContinueError(" ".join([*filter(None, problems), REMEDY]))

    async def _conversations(self, sampling: ForcedSampling) -> list[Conversation]:
        """Return the conversations that the server is made to answer: a first message, and then a tool's result."""
        opened, bare = await asyncio.gather(sampling.render(USER, True), sampling.render(USER, False))
        if opened[: len(bare)] != bare:
            raise CannotContinueError("its template does not open an answer by appending tokens to the conversation.")
        conversations = [Conversation(USER, tuple(opened))]
        later = after_call(USER)
        if self._tools and (prompt := await unless_refused(sampling.render(later, True))) is not None:
            conversations.append(Conversation(later, tuple(prompt), " after a tool call"))
        return conversations

    def _hermes_mode(
        self, answers: list[ForcedAnswer], reasons: bool, tail: PromptTail, call_problem: str | None
    ) -> tuple[Reasoning | None, str | None]:
        """Return the reasoning mode in which the Hermes parser agrees with the chat route, and None.

        If there is no such mode, return None and the reason.
        """
        # If the prompt has `<think>`, the penalty excludes another one, so that no answer begins with the tag.
        optional = {IN_REASONING, *([TAGGED] if reasons and tail != "none" else [])}
        if (problem := unforced(answers, optional) or call_problem) is not None:
            return None, problem
        whole = [answer for answer in answers if not answer.cut and self._tail(answer.prompt) == tail]
        return matching_reasoning_mode(whole, tools=self._tools)

    def _require_recognised_call(self, answers: list[ForcedAnswer], problem: str | None) -> None:
        """Raise CannotContinueError if calls in the template's format were sampled, and the chat route parsed none."""
        with_call = [answer for answer in answers if answer.contains_call and answer.raw_finish == "stop"]
        if with_call and not any(answer.parsed.calls for answer in with_call):
            unrecognised = (
                "The server's chat route did not recognise a tool call in the chat template's format. "
                "Start vLLM with the --tool-call-parser of this model."
            )
            raise CannotContinueError(unrecognised if problem is None else f"{problem} {unrecognised}")

    async def _misses_grammar(self, config: ParserConfig, request: ChatRequest) -> bool:
        """Return whether `config` fails to explain a grammar that the server was seen to add.

        A configuration explains the grammar only if its parsers run in the side process and add a grammar.
        """
        if not self.adds_grammar:
            return False
        return config.kind != "process" or not await self._has_grammar(config.parsers, request)

    def _tail(self, prompt: Sequence[int] | TokenIds) -> PromptTail:
        """Return `open` or `closed` if the tokens after a prompt's last turn open or close reasoning, else `none`."""
        near = tuple(int(token) for token in prompt[-_TAIL_TOKENS:])
        near = near[last_position(near, (self._end_of_turn,)) + 1 :]
        places = {tag: last_position(near, self._tags[tag]) for tag in (THINK, END_THINK)}
        if max(places.values()) < 0:
            return "none"
        return "open" if places[THINK] > places[END_THINK] else "closed"

    async def _call_format_problem(self, sampling: ForcedSampling) -> str | None:
        """Return None if the Hermes parser can read tool calls in the chat template's format, else the reason.

        The model is expected to write its calls as the template writes the calls of earlier turns.
        """
        if not self._tools:
            return None
        turn = call_turn([{"path": "a"}])
        bare, whole = await asyncio.gather(sampling.render(USER, False), sampling.render([*USER, turn], False))
        written = await self._client.decode(whole[len(bare) :])
        parsed = HermesParser(tools=True).parse(SampleEvent(text=written))
        found = [(call.name, _parse_json(call.arguments)) for call in parsed.tool_calls]
        if found == [("look", {"path": "a"})]:
            return None
        return "The template writes tool calls in another format than Hermes."

    async def _match_process(
        self,
        config: ParserConfig,
        answers: list[ForcedAnswer],
        sampling: ForcedSampling,
        conversations: list[Conversation],
    ) -> ParserConfig | str:
        """Return `config` with the pair of vLLM's parsers that parses these answers as the chat route does.

        If no pair or several pairs do this, or if vLLM's parsers cannot be run, return the reason as a text.
        """
        if self.process is None:
            return "vLLM's package was not found on this machine."
        if (
            self._tools
            and self._parsers is None
            and not any(answer.contains_call and answer.parsed.calls for answer in answers)
        ):
            return (
                "The server could not be made to sample a tool call in the template's format, so it is unknown which "
                "of vLLM's parsers it uses. Name them by the setting engine.vllm_parsers, as TOOL/REASONING."
            )
        request = parser_request(self._client.model, sampling.request)
        try:
            await self.process.ensure_started()
            tagged = await sampling.force_tags(self.process.reasoning_tags, conversations[0])
            samples = [answer.to_sample() for answer in [*answers, *tagged]]
            given = None if self._parsers is None else [self._parsers]
            found = await self.process.match(request, samples, given)
            if len(found) > 1:
                found = await self._distinguish(found, [*answers, *tagged], sampling, conversations)
        except EngineError as error:
            return str(error)
        if not found:
            return (
                f"None of the parsers of vLLM {self.process.version} parses the answers as the server's chat route "
                "does."
            )
        if len(found) > 1:
            names = ", ".join(f"{tool or ''}/{reasoning or ''}" for tool, reasoning in found[:6])
            return (
                f"Several of vLLM's parsers parse the sampled answers as the server's chat route does ({names}). Name "
                "the server's own parsers by the setting engine.vllm_parsers, as TOOL/REASONING."
            )
        return replace(config, kind="process", parsers=found[0])

    async def _distinguish(
        self,
        found: list[Parsers],
        answers: list[ForcedAnswer],
        sampling: ForcedSampling,
        conversations: list[Conversation],
    ) -> list[Parsers]:
        """Return the pairs of parsers in `found` that also parse further answers as the server does.

        In each round, the server samples answers that the remaining pairs parse differently. If there are no such
        answers to sample, the pairs count as equal, and one pair is returned. If several rounds in a row exclude no
        pair, all remaining pairs are returned.
        """
        assert self.process is not None
        request = parser_request(self._client.model, sampling.request)
        end_of_reasoning = await find_end_of_reasoning(self._client, sampling.render, USER)
        bodies = [
            after_reasoning(answer.ids, end_of_reasoning) for answer in answers if self._end_of_turn not in answer.ids
        ]
        plain = next(answer.ids for answer in answers if answer.wanted == PLAIN)
        start = plain[: len(plain) - len(after_reasoning(plain, end_of_reasoning))]
        known = {"start": start, "bodies": bodies, "stop": self._end_of_turn}
        prompts = [each.prompt for each in conversations]

        async def force(number: int, body: list[int]) -> ForcedAnswer | None:
            target = TargetAnswer("an answer that parsers do not parse alike", tuple(body))
            return await sampling.force_target(target, end_of_reasoning, conversations[number])

        seed = in_vain = 0
        while len(found) > 1 and in_vain < _ROUNDS:
            differing = await self.process.distinguish(request, prompts, known, found, seed)
            if not differing:
                return [await self._first_with_grammar(found, sampling.request)]
            forced = await asyncio.gather(*(force(number, body) for number, body in differing))
            samples = [answer.to_sample() for answer in forced if answer is not None]
            left = await self.process.match(request, samples, found)
            in_vain = in_vain + 1 if left == found else 0
            found, seed = left, seed + 1
        return found

    async def _first_with_grammar(self, pairs: list[Parsers], request: ChatRequest) -> Parsers:
        """Return the first pair of parsers with which vLLM constrains the answer by a grammar; else the first pair.

        Which of the pairs the server uses is not known. If the server uses a pair without a grammar, its answers are
        needlessly recorded as constrained, and not trained. The opposite error would train constrained answers as free
        answers.
        """
        for pair in pairs:
            if await self._has_grammar(pair, request):
                return pair
        return pairs[0]

    async def _has_grammar(self, parsers: Parsers, request: ChatRequest) -> bool:
        assert self.process is not None
        short_request = parser_request(self._client.model, request)
        stream = await self.process.open(parsers, short_request, [self._end_of_turn])
        stream.close()
        return stream.sampling["constraint"] is not None

    async def _match_derender(
        self,
        config: ParserConfig,
        answers: list[ForcedAnswer],
        sampling: ForcedSampling,
        conversations: list[Conversation],
    ) -> ParserConfig | str:
        """Return the configuration that parses with the server's route `/derender`, or why there is none.

        The route must parse each whole answer as the chat route did. If it also does so when the answers are sent in
        pieces, streams are parsed piece by piece. Otherwise a stream is parsed at its end.
        """

        async def derender(answer: ForcedAnswer, config: ParserConfig) -> ParsedAnswer:
            prompt = np.array(answer.prompt, dtype=np.int32)
            parser = DerenderAnswerParser(self._client, sampling.request, prompt, config)
            pieces = [answer.sampled[at : at + _PIECES] for at in range(0, len(answer.sampled), _PIECES)]
            events = [SampleEvent(token_ids=piece) for piece in pieces]
            events[-1] = replace(events[-1], finish_reason=answer.raw_finish)
            return ParsedAnswer.of([await parser.parse(event) for event in events])

        answers = [answer for answer in answers if not answer.cut]
        pieces, whole = replace(config, kind="derender"), replace(config, kind="derender_whole")
        if await unless_refused(derender(answers[0], whole)) is None:
            return f"The server does not offer {DERENDER}."
        for answer in answers:
            if await derender(answer, whole) != answer.parsed:
                return f"The server's {DERENDER} and chat route parse {answer.name} differently."
        parsed = await asyncio.gather(*(unless_refused(derender(answer, pieces)) for answer in answers))
        return pieces if parsed == [answer.parsed for answer in answers] else whole


def _key(options: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(options), option=orjson.OPT_SORT_KEYS)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
