"""Make a server's chat route sample answers that Polar chose. Different texts are forced in different ways:

* An answer as the template writes it is forced by a grammar of its token ids (`target_answers.forcing_fields`).
* Text and Hermes tool calls are forced by `structured_outputs: {"choice": [text]}`. With a reasoning parser, vLLM
  applies this grammar only after the reasoning; a bias for the `</think>` token ends the reasoning at once.
* Reasoning is forced by descending biases for `<think>`, a letter and `</think>`. A repetition penalty excludes each
  token after its first use, so that each comes once and in this order.

The ids show whether a text was really sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polar_proxy.engines.base import CannotContinueError
from polar_proxy.engines.hermes import CALL, END_CALL, END_THINK, THINK
from polar_proxy.engines.openai_stream import MISSING_BELOW
from polar_proxy.engines.vllm.client import CHAT, COMPLETIONS, VllmClient, conversation_fields, unless_refused
from polar_proxy.engines.vllm.forced_answers import (
    CALL_TEXTS,
    EMPTY_CALL,
    IN_REASONING,
    LETTER,
    PLAIN,
    TAGGED,
    ForcedAnswer,
    ParsedAnswer,
    ids_without,
    last_position,
)
from polar_proxy.engines.vllm.target_answers import (
    ARGUMENTS,
    REASONING,
    TOOL,
    UNWANTED,
    USER,
    Conversation,
    TargetAnswer,
    after_reasoning,
    call_turn,
    find_end_of_reasoning,
    forcing_fields,
    template_answers,
)
from polar_proxy.errors import EngineError
from polar_proxy.types import ChatRequest, Json, SampleEvent

_TOGETHER = 8
"""Maximum number of requests to the server at a time."""
_ALTERNATIVES = 5


async def encode_tags(client: VllmClient) -> dict[str, tuple[int, ...]]:
    """Return the token ids of each text that gets a bias: the tags of reasoning and calls, and two other texts."""
    texts = (THINK, END_THINK, CALL, END_CALL, LETTER, UNWANTED)
    ids = await asyncio.gather(*map(client.encode, texts))
    return dict(zip(texts, map(tuple, ids), strict=True))


class ForcedSampling:
    """Requests that make one server sample chosen answers. All have the same tools and template options."""

    def __init__(
        self, client: VllmClient, request: ChatRequest, tags: Mapping[str, tuple[int, ...]], *, end_of_turn: int
    ) -> None:
        """`request`: a request with the tools and template options, but without messages. `tags`: see `encode_tags`."""
        self.request = request
        self._client = client
        self._tags = tags
        self._end_of_turn = end_of_turn
        self._chat_fields = conversation_fields(request)
        self._slots = asyncio.Semaphore(_TOGETHER)

    async def render(self, messages: list[Json], generation: bool) -> list[int]:
        body = {"messages": messages, "add_generation_prompt": generation}
        return await self._client.render(self._chat_fields | body)

    async def _sample(self, path: str, body: Json) -> list[SampleEvent]:
        async with self._slots:
            return await self._client.sampled(path, {"temperature": 0, "return_token_ids": True, **body})

    async def _chat(self, name: str, conversation: Conversation, fields: Json, wanted: str = "") -> ForcedAnswer:
        body = {"messages": conversation.messages, "max_tokens": 200, **fields}
        events = await self._sample(CHAT, self._chat_fields | body)
        parsed = ParsedAnswer.of(events)
        sampled = tuple(token for event in events for token in event.token_ids)
        return ForcedAnswer(
            name + conversation.name_suffix,
            wanted,
            ids=sampled if parsed.finish == "length" else sampled[:-1],
            parsed=parsed,
            sampled=sampled,
            chunks=tuple(len(event.token_ids) for event in events),
            prompt=conversation.prompt,
        )

    def _bias(self, biases: Mapping[str, float]) -> Json:
        """Return the field `logit_bias` with the bias of each text. A text of several tokens gets no bias."""
        tokens = {self._tags[text]: bias for text, bias in biases.items()}
        return {"logit_bias": {str(ids[0]): bias for ids, bias in tokens.items() if len(ids) == 1}}

    async def force_target(
        self, target: TargetAnswer, end_of_reasoning: int | None, conversation: Conversation
    ) -> ForcedAnswer | None:
        """Make the server sample `target` as its answer to `conversation`, and return the answer.

        Returns None if the server refuses the request.
        """
        fields = forcing_fields(target, end_of_reasoning, self._tags[UNWANTED])
        return await unless_refused(self._chat(target.name, conversation, fields))

    async def short_answer(self, conversation: Conversation) -> ForcedAnswer:
        """Make the server answer with two letters. They are parsed as reasoning if answers begin inside reasoning."""
        fields = self._bias({LETTER: 100}) | {"max_tokens": 2}
        return replace(await self._chat("two letters", conversation, fields, LETTER), cut=True)

    async def special_answer(self, conversation: Conversation) -> ForcedAnswer:
        """Make the server answer with special tokens only.

        If the server shows special tokens in its answers, the answer has text. Otherwise its text is empty.
        """
        fields = {"logit_bias": {str(self._end_of_turn): 100}, "max_tokens": 2, "ignore_eos": True}
        return replace(await self._chat("special tokens", conversation, fields), cut=True)

    async def force_answers(self, conversation: Conversation, reasons: bool) -> list[ForcedAnswer]:
        """Sample plain text, Hermes calls and tagged reasoning. `reasons`: answers begin inside reasoning."""

        async def force(name: str, text: str, biases: Mapping[str, float], before: str = "") -> ForcedAnswer | None:
            # `before`, the text before the grammar's, is sampled by descending biases under a penalty.
            penalty = {"repetition_penalty": 4.0, "max_tokens": 60} if before else {"repetition_penalty": 1.0}
            fields = self._bias(biases) | penalty | {"structured_outputs": {"choice": [text]}}
            try:
                return await self._chat(name, conversation, fields, before + text)
            except EngineError:
                if name != IN_REASONING:
                    raise
                return None  # a model that samples other tokens there breaks vLLM's grammar, which ends the request

        # Reasoning must end before a call, whose tag has the smaller bias: some parsers end it at the call's tag too.
        plain = {THINK: 25, END_THINK: 100, CALL: 50, END_CALL: 50}
        texts = {"plain text": PLAIN} | (CALL_TEXTS if self.request.tools else {})
        requests = [force(name, text, plain) for name, text in texts.items()]
        thought = f"{THINK}{LETTER}{END_THINK}"
        if reasons:
            requests.append(force("reasoning", PLAIN, {LETTER: 100, END_THINK: 50}, f"{LETTER}{END_THINK}"))
            requests.append(force(TAGGED, PLAIN, {THINK: 100, LETTER: 75, END_THINK: 50}, thought))
            if self.request.tools:
                # If a tool call ends the reasoning, its tag is the first token that the grammar sees.
                requests.append(force(IN_REASONING, EMPTY_CALL, {LETTER: 70, CALL: 100}, LETTER))
        else:
            requests.append(force(TAGGED, f"{thought}{PLAIN}", plain))
        return [answer for answer in await asyncio.gather(*requests) if answer is not None]

    async def force_template_answers(self, conversations: Sequence[Conversation]) -> list[ForcedAnswer]:
        """Sample answers in the template's format, with and without tool calls, in each of these conversations."""
        if not self.request.tools:
            return []
        targets, end_of_reasoning, plain = await asyncio.gather(
            template_answers(self.render, USER, self._end_of_turn),
            find_end_of_reasoning(self._client, self.render, USER),
            self._client.encode(PLAIN),
        )

        async def force(target: TargetAnswer, conversation: Conversation) -> ForcedAnswer | None:
            # The last token may be one at which the server stops, and such a token cannot be forced.
            for each in (target, replace(target, ids=target.ids[:-1])):
                answer = await self.force_target(each, end_of_reasoning, conversation)
                if answer is not None:
                    sampled = last_position(answer.sampled, after_reasoning(each.ids, end_of_reasoning)) >= 0
                    contains_call = (sampled and target.contains_call) or bool(answer.parsed.calls)
                    return replace(answer, contains_call=contains_call, cut=target.cut)
            return None

        targets.append(TargetAnswer("plain text in its template's format", tuple(plain)))
        forced = await asyncio.gather(*(force(target, each) for each in conversations for target in targets))
        return [answer for answer in forced if answer is not None]

    async def open_reasoning(self, conversation: Conversation) -> ForcedAnswer | None:
        """Make the server begin an answer with reasoning in the template's format, and cut it after a few letters.

        Returns None if the server did not do this. Used for servers whose grammar covers the whole answer and allows
        reasoning before the text (gpt-oss). Other grammars begin only where the text begins.
        """
        turn = call_turn(ARGUMENTS[:1]) | {"reasoning": REASONING, "reasoning_content": REASONING}
        whole = await unless_refused(self.render([*conversation.messages, turn], False)) or []
        before, found, _ = (await self._client.decode(whole[len(conversation.prompt) :])).partition(REASONING)
        opening = tuple(await self._client.encode(before)) if found else ()
        if not opening:
            return None
        biases = dict.fromkeys(opening, 50) | dict.fromkeys(self._tags[LETTER], 100)
        fields = {
            "structured_outputs": {"choice": [PLAIN]},
            "logit_bias": {str(token): bias for token, bias in biases.items()},
            "max_tokens": len(opening) + 4,
        }
        answer = await unless_refused(self._chat("cut reasoning", conversation, fields))
        if answer is None or answer.sampled[: len(opening)] != opening:
            return None
        return replace(answer, cut=True)

    async def force_tags(self, tags: Sequence[tuple[str, str]], conversation: Conversation) -> list[ForcedAnswer]:
        """Sample one answer for each pair in `tags`. In the answer, the tags enclose a letter as the reasoning.

        Returns only the answers whose tokens the server really sampled.
        """

        async def force(start: str, end: str) -> ForcedAnswer | None:
            ids = tuple(await self._client.encode(f"{start}{LETTER}{end}{PLAIN}"))
            target = TargetAnswer(f"a letter between {start} and {end}", ids)
            answer = await self.force_target(target, None, conversation)
            return answer if answer is not None and last_position(answer.sampled, ids) >= 0 else None

        forced = await asyncio.gather(*(force(start, end) for start, end in tags))
        return [answer for answer in forced if answer is not None]

    async def read_back(self, answers: list[ForcedAnswer], prompt: Sequence[int]) -> tuple[list[ForcedAnswer], bool]:
        """Return the answers with their decoded texts, and whether completions show special tokens by default.

        The default matters because the tags of reasoning and tool calls are special tokens in some models. All ids are
        decoded in one request, separated by end-of-turn tokens. Raises CannotContinueError if the texts cannot be
        separated, or if the text of a completion is not the decoding of its ids.
        """
        biases = self._bias({CALL: 100, END_THINK: 75, THINK: 50})
        body = {"prompt": list(prompt), "max_tokens": 3, "repetition_penalty": 4.0, **biases}
        shown, plain = await asyncio.gather(
            self._sample(COMPLETIONS, body | {"skip_special_tokens": False}),
            self._sample(COMPLETIONS, body),
        )
        end = self._end_of_turn
        rows = [ids_without(shown, end), ids_without(plain, end), *(answer.ids for answer in answers)]
        joined = [token for row in rows for token in (end, *row)]
        mark = await self._client.decode([end])
        before, *texts = (await self._client.decode(joined)).split(mark)
        if before or len(texts) != len(rows):
            raise CannotContinueError("the model's end-of-turn token cannot be recognised in decoded text.")
        if texts[0] != "".join(event.text for event in shown):
            raise CannotContinueError(
                "the text of the server's completions differs from the decoded text of their token ids."
            )
        read = [replace(answer, text=text) for answer, text in zip(answers, texts[2:], strict=True)]
        return read, texts[1] == "".join(event.text for event in plain)


async def adds_grammar(client: VllmClient, *, renders: bool) -> bool:
    """Return whether the server adds a grammar to requests with tools on its chat route.

    Such a grammar is an alternative to the request's grammar (`--tool-strict-level function`), or replaces it (GLM's
    and Cohere's parsers). To find out, this function sends a request with tools and a grammar that allows one text
    only, and looks at the most likely tokens where that text begins. If the text is not sampled, the request is sent
    again without tools. Returns True in three cases:

    * With tools, the text is sampled, but another first token was also allowed: the alternative.
    * The text is sampled without tools, but not with tools: the request's grammar was replaced.
    * The text is sampled neither with nor without tools, and some first tokens are forbidden, but only with tools.
      (gpt-oss reasons before the text, under a grammar of vLLM's that does not depend on tools.)

    Returns False in all other cases, also if the server refuses the requests. `renders`: whether the client can render
    conversations.
    """
    plain, unwanted = await asyncio.gather(*(unless_refused(client.encode(text)) for text in (PLAIN, UNWANTED)))
    if plain is None or unwanted is None:
        return False
    target = TargetAnswer("plain text", tuple(plain))
    forced, allowed = await _forced_and_allowed(client, target, unwanted, {"tools": [TOOL]}, renders=renders)
    if forced or not allowed:
        return sum(allowed) > 1
    forced_without, allowed_without = await _forced_and_allowed(client, target, unwanted, {}, renders=renders)
    return forced_without or (not all(allowed) and bool(allowed_without) and all(allowed_without))


async def _forced_and_allowed(
    client: VllmClient, target: TargetAnswer, unwanted: Sequence[int], chat_fields: Json, *, renders: bool
) -> tuple[bool, list[bool]]:
    """Make the server sample `target`, and return two results. The first is whether the server did so.

    The second is a list of booleans, one for each of the likeliest tokens at the position where the grammar begins:
    whether the server allowed this token. The list is empty if the server refuses the request.
    """

    async def render(messages: list[Json], generation: bool) -> list[int]:
        return await client.render({"messages": messages, "add_generation_prompt": generation, **chat_fields})

    end_of_reasoning = await find_end_of_reasoning(client, render, USER) if renders else None
    body = chat_fields | forcing_fields(target, end_of_reasoning, unwanted) | {"messages": USER}
    wanted = {"temperature": 0, "logprobs": True, "top_logprobs": _ALTERNATIVES, "return_token_ids": True}
    answer = await unless_refused(client.chat(body | wanted))
    if answer is None:
        return False, []
    choice = answer["choices"][0]
    ids, rows = tuple(choice["token_ids"]), choice["logprobs"]["content"]
    place = last_position(ids, target.ids)
    first = place if place >= 0 else int(ids[0] == end_of_reasoning)  # the grammar begins after the reasoning
    likeliest = [other for row in rows[first : first + 1] for other in row["top_logprobs"]]
    return place >= 0, [other["logprob"] > MISSING_BELOW for other in likeliest]
