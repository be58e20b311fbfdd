"""vLLM's own answer parsers as a program: it runs in vLLM's environment and imports nothing of Polar.

    python parser_worker.py MODEL

MODEL is a folder or a name in the local Hugging Face cache. Requests and replies are lines of JSON on standard input
and output, one reply for each request, in order. The first line of output is a greeting: vLLM's version, the tags of
reasoning and the stop tokens.

    {"op": "open", "answer": 1, "parsers": ["hermes", "qwen3"], "request": {...}, "prompt": [ids]}
        -> {"special": true, "constraint": null}
    {"op": "feed", "answer": 1, "index": 0, "ids": [ids], "finish": null}
        -> {"text": "Hi", "reasoning": "", "calls": [], "finish": null}
    {"op": "close", "answer": 1} -> {}
    {"op": "render", "requests": [{...}]}
        -> {"renderings": [[[ids], text]]}, or {"refused": text}
    {"op": "match", "request": {...}, "samples": [...], "parsers": null}
        -> {"parsers": [["hermes", "qwen3"]]}
    {"op": "distinguish", "request": {...}, "prompts": [[ids]], "answers": {...}, "parsers": [...], "seed": 1}
        -> {"answers": [[0, [ids]]]}

A failed request is answered with {"error": text}. With `feed`, an answer goes through the detokenizer and the parser of
vLLM's chat route, one token at a time, with the request as that route changes it (`adjust_request`). With `match`,
samples of the server's answers go through the parser in the chunks in which the server streamed them (`chunks`),
because some parsers lose calls if several tokens come at once. Conversations are rendered by the renderer of the chat
route, with its defaults. For most models the renderer uses the chat template. For gpt-oss it uses a library
(openai-harmony), and for some other models code in vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from itertools import accumulate, combinations
from random import Random
from typing import Any

Json = dict[str, Any]
del sys.path[0]  # this folder, whose modules are not vLLM's
_TEXT_TAIL = 64
"""Number of last prompt tokens given to the detokenizer. The text of an answer's first tokens may depend on them."""

HARMONY_OPENING = "<|start|>assistant"
"""Text that vLLM writes at the end of every conversation with gpt-oss, even if no answer is requested."""

_COMPARISONS = 600
"""Maximum number of parses in one search. A search compares pairs of a tool parser and a reasoning parser: each pair
parses each answer."""
_FEWEST = 20
"""Number of answers that a search may always try, even if this takes more than `_COMPARISONS` parses."""
_DIFFERENCES = 6
"""A search ends when it has found this many answers that the compared parsers do not all parse in the same way."""

from vllm import __version__  # noqa: E402
from vllm.config import ModelConfig, VllmConfig  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.exceptions import VLLMClientError  # noqa: E402
from vllm.parser import Parser, ParserManager  # noqa: E402
from vllm.reasoning import ReasoningParserManager  # noqa: E402
from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # noqa: E402
from vllm.tokenizers import cached_tokenizer_from_config  # noqa: E402
from vllm.tool_parsers import ToolParserManager  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.engine.detokenizer import IncrementalDetokenizer  # noqa: E402


class ServedModel:
    """The parts of a served model that parsing needs: its configuration and its tokenizer."""

    def __init__(self, name: str) -> None:
        self.config = ModelConfig(model=name)
        self.tokenizer = cached_tokenizer_from_config(self.config)
        self.harmony = self.config.hf_config.model_type == "gpt_oss"

        self._classes: dict[tuple[str | None, str | None], type[Parser] | None] = {}
        self._renderer: Any = None

    def stop_ids(self) -> list[int]:
        named = self.config.try_get_generation_config().get("eos_token_id") or []
        stops = [self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
        return list(dict.fromkeys(token for token in stops if token is not None))

    async def render(self, request: Json) -> tuple[list[int], str]:
        """Return the prompt's ids and text, as the chat route renders them. Raises ValueError if vLLM refuses the
        request."""
        # Imported here, because few servers need it and the import takes as long as all others together.
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.renderers.registry import renderer_from_config

        if self._renderer is None:
            renderer = renderer_from_config(VllmConfig(model_config=self.config))
            self._renderer = OnlineRenderer(
                self.config,
                renderer,
                request_logger=None,
                chat_template=None,
                chat_template_content_format="auto",
                enable_auto_tools=True,
            )
        chat = ChatCompletionRequest.model_validate(request)
        rendered = await self._renderer.render_chat(chat)
        if isinstance(rendered, ErrorResponse):
            raise ValueError(rendered.error.message)
        ids = list(rendered[1][0]["prompt_token_ids"])
        if self.harmony and not chat.add_generation_prompt:
            ids = ids[: -len(self.tokenizer.encode(HARMONY_OPENING))]
        return ids, self.tokenizer.decode(ids)

    def parser_class(self, tool_parser: str | None, reasoning_parser: str | None) -> type[Parser] | None:
        key = tool_parser, reasoning_parser
        if key not in self._classes:
            found = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=tool_parser is not None,
                model_name=self.config.model,
                is_harmony=self.harmony,
                tokenizer=self.tokenizer,
            )
            # For gpt-oss, vLLM returns one class, and each call changes its attributes. A subclass keeps them.
            parts = ("tool_parser_cls", "reasoning_parser_cls")
            attributes = {name: getattr(found, name) for name in parts} if found else {}
            self._classes[key] = found and type(found.__name__, (found,), attributes)
        return self._classes[key]

    def reasoning_tags(self) -> list[tuple[str, str]]:
        """Return the pairs of tags that vLLM's reasoning parsers expect, such as (`<think>`, `</think>`).

        Parsers that cannot be used with this model are left out.
        """
        found: dict[tuple[str, str], None] = {}
        for name in sorted(set(ReasoningParserManager.list_registered())):
            try:
                parser = ReasoningParserManager.get_reasoning_parser(name)(self.tokenizer)
            except Exception:  # noqa: BLE001  most need control tokens that this model does not have
                continue
            start, end = parser.reasoning_start_str, parser.reasoning_end_str
            if isinstance(start, str) and isinstance(end, str):
                found[start, end] = None
        return list(found)


class ParsedChoice:
    """One choice of an answer: its detokenizer, its parser, and whether it has called a tool."""

    def __init__(self, answer: OpenAnswer) -> None:
        self._request = answer.request
        self._prompt = answer.prompt
        self._parser = answer.make_parser()
        self._detokenizer = IncrementalDetokenizer.from_new_request(answer.model.tokenizer, answer.core_request)
        self._calls_tools = False

    def feed(self, token_ids: list[int], finish: str | None, chunks: Sequence[int] | None = None) -> Json:
        """Parse these tokens one by one; with `chunks`, chunk by chunk. `chunks`: number of tokens of each chunk."""
        out: Json = {"text": "", "reasoning": "", "calls": [], "finish": finish}
        sizes = [size for size in chunks or () if size] or [1] * max(1, len(token_ids))
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            end = start + size
            self._feed(token_ids[start:end], finish if end >= len(token_ids) else None, out)
        if finish == "stop" and self._calls_tools:
            out["finish"] = "tool_calls"
        return out

    def _feed(self, token_ids: list[int], finish: str | None, out: Json) -> None:
        *before, last = [[token] for token in token_ids] or [[]]
        text = "".join(self._next_text(each, None) for each in before) + self._next_text(last, finish)
        if self._parser is None:
            out["text"] += text
            return
        delta = self._parser.parse_delta(
            text, token_ids, self._request, prompt_token_ids=self._prompt, finished=finish is not None
        )
        if delta is None:
            return
        out["text"] += delta.content or ""
        out["reasoning"] += delta.reasoning or ""
        for call in delta.tool_calls or ():
            self._calls_tools = True
            function = call.function
            name, arguments = (function.name, function.arguments) if function else (None, None)
            out["calls"].append({"index": call.index, "id": call.id, "name": name, "arguments": arguments or ""})

    def _next_text(self, token_ids: list[int], finish: str | None) -> str:
        """Return the text that one token adds. A token that ends the answer adds no text, unless it completes a stop
        string."""
        may_be_string = bool(self._request.stop)
        before = len(self._detokenizer.output_text)
        stop_string = self._detokenizer.update(token_ids, finish == "stop" and not may_be_string)
        if finish == "stop" and stop_string is None:
            self._detokenizer.output_text = self._detokenizer.output_text[:before]
        return str(self._detokenizer.get_next_output_text(finish is not None or stop_string is not None, delta=True))


class OpenAnswer:
    """One request that is being answered. Each of its choices has its own parser."""

    def __init__(self, model: ServedModel, parsers: list[str | None], request: Json, prompt: list[int]) -> None:
        self.model = model
        self.prompt = prompt
        self._class = model.parser_class(*parsers)
        self.request = ChatCompletionRequest.model_validate(request)
        self._options = self.request.build_chat_params(None, "auto").chat_template_kwargs
        changes = self._class is not None and (
            self._class.always_adjust_request
            or self._class.reasoning_parser_cls is not None
            or self.request.tool_choice != "none"
        )
        if changes and (parser := self.make_parser()) is not None:
            self.request = parser.adjust_request(self.request)
        stop = self.request.stop or None
        skip = self.request.skip_special_tokens
        self.core_request = EngineCoreRequest(
            request_id="polar",
            prompt_token_ids=prompt[-_TEXT_TAIL:],
            mm_features=None,
            sampling_params=SamplingParams(
                stop=stop,
                skip_special_tokens=skip,
                spaces_between_special_tokens=self.request.spaces_between_special_tokens,
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._choices: dict[int, ParsedChoice] = {}

    def make_parser(self) -> Parser | None:
        if self._class is None:
            return None
        return self._class(
            self.model.tokenizer,
            self.request.tools,
            chat_template_kwargs=self._options,
            model_config=self.model.config,
        )

    def sampling(self) -> Json:
        """Return two settings of the chat route for this request.

        `special`: whether the text shows special tokens. `constraint`: the grammar of the answer, or None.
        """
        constraint = self.request.structured_outputs
        if isinstance(constraint, StructuredOutputsParams):
            named = {key: value for key, value in asdict(constraint).items() if value is not None}
            constraint = {key: value for key, value in named.items() if not key.startswith("_") and value is not False}
        return {"special": not self.request.skip_special_tokens, "constraint": constraint or None}

    def feed(self, index: int, token_ids: list[int], finish: str | None, chunks: Sequence[int] | None = None) -> Json:
        if index not in self._choices:
            self._choices[index] = ParsedChoice(self)
        return self._choices[index].feed(token_ids, finish, chunks)


class ParserWorker:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._answers: dict[int, OpenAnswer] = {}
        self._loop = asyncio.new_event_loop()

    def greeting(self) -> Json:
        return {
            "version": __version__,
            "reasoning_tags": self._model.reasoning_tags(),
            "stop_ids": self._model.stop_ids(),
        }

    def reply(self, line: Json) -> Json:
        operation = line["op"]
        if operation == "open":
            answer = OpenAnswer(self._model, line["parsers"], line["request"], line["prompt"])
            self._answers[line["answer"]] = answer
            return answer.sampling()
        if operation == "feed":
            return self._answers[line["answer"]].feed(line["index"], line["ids"], line["finish"])
        if operation == "close":
            self._answers.pop(line["answer"], None)
            return {}
        if operation == "render":
            try:
                return {
                    "renderings": [self._loop.run_until_complete(self._model.render(one)) for one in line["requests"]]
                }
            except (VLLMClientError, ValueError) as error:
                return {"refused": str(error)}
        if operation == "match":
            return {"parsers": self._match(line["request"], line["samples"], line["parsers"])}
        if operation == "distinguish":
            answers, random = line["answers"], Random(line["seed"])
            return {"answers": self._distinguish(line["request"], line["prompts"], answers, line["parsers"], random)}
        raise ValueError(f"There is no operation {operation!r}.")

    # Which parsers does a server use? Those that parse samples of its answers as it did.

    def _match(
        self, request: Json, samples: list[Json], given: list[list[str | None]] | None
    ) -> list[list[str | None]]:
        """Return the pairs (tool parser, reasoning parser) that parse each sample into the sample's expected result.

        Only the pairs `given` are tried, in their order. If `given` is None, every pair is tried: first the pairs
        without a reasoning parser, then the others. Both groups are ordered by how much the two names resemble the
        model type and each other. If several matching pairs mean the same classes, only the first is returned. To save
        time, tool parsers are first tried alone, on the samples with a tool call.
        """
        if given is not None:
            return [pair for pair in given if self._agrees(pair, request, samples)]
        tool_parsers: list[str | None] = [None]
        if request.get("tools"):
            with_call = [sample for sample in samples if sample["contains_call"]]
            names = sorted(set(ToolParserManager.list_registered()))
            tool_parsers = [
                name for name in names if self._agrees([name, None], request, with_call, compare_calls_only=True)
            ]
        reasoning_parsers = [None, *sorted(set(ReasoningParserManager.list_registered()))]
        pairs = [[tool, reasoning] for tool in tool_parsers for reasoning in reasoning_parsers]
        pairs.sort(key=self._unlikeness)
        found: dict[tuple[object, object], list[str | None]] = {}
        for pair in pairs:
            if self._agrees(pair, request, samples):
                parser = self._model.parser_class(*pair)
                found.setdefault((parser and parser.tool_parser_cls, parser and parser.reasoning_parser_cls), pair)
        return list(found.values())

    def _unlikeness(self, pair: list[str | None]) -> tuple[int, float]:
        names = [self._model.config.hf_config.model_type, *(name for name in pair if name)]
        alike = sum(SequenceMatcher(None, one, other).ratio() for one, other in combinations(names, 2))
        return -pair.count(None), -alike

    def _agrees(
        self, parsers: list[str | None], request: Json, samples: list[Json], *, compare_calls_only: bool = False
    ) -> bool:
        keys = () if compare_calls_only else ("text", "reasoning", "finish")
        try:
            for sample in samples:
                answer = OpenAnswer(self._model, parsers, request, sample["prompt"])
                parsed = merged(answer.feed(0, sample["ids"], sample["raw_finish"], sample["chunks"]))
                if not same_calls(parsed["calls"], sample["calls"]) or any(parsed[key] != sample[key] for key in keys):
                    return False
        except Exception:  # noqa: BLE001  a parser that cannot read this model's answers may fail in any way
            return False
        return True

    def _distinguish(
        self, request: Json, prompts: list[list[int]], answers: Json, pairs: list[list[str | None]], random: Random
    ) -> list[tuple[int, list[int]]]:
        """Return random answers that tell the pairs of parsers apart. See `ParserProcess.distinguish`."""
        out: list[tuple[int, list[int]]] = []
        for _ in range(max(_FEWEST, _COMPARISONS // len(pairs))):
            number, body = random.randrange(len(prompts)), vary(answers["bodies"], random)
            ids = [*answers["start"], *body, answers["stop"]]
            if len({self._parse(pair, request, prompts[number], ids) for pair in pairs}) > 1:
                out.append((number, body))
                if len(out) == _DIFFERENCES:
                    break
        return out

    def _parse(self, parsers: list[str | None], request: Json, prompt: list[int], ids: list[int]) -> str:
        """Parse a whole answer. Return it as JSON; if the parser fails, return the name of its error."""
        try:
            answer = OpenAnswer(self._model, parsers, request, prompt)
            return json.dumps(merged(answer.feed(0, ids, "stop")))
        except Exception as error:  # noqa: BLE001  a parser may fail in any way on what no model would write
            return type(error).__name__


def vary(bodies: list[list[int]], random: Random) -> list[int]:
    """Return one of these sequences with one to three random changes. A change deletes tokens, repeats tokens, or
    inserts tokens of any of the sequences."""
    out = list(random.choice(bodies))
    for _ in range(random.randint(1, 3)):
        place, size = random.randint(0, len(out)), random.randint(1, 6)
        change = random.choice(["leave out", "repeat", "put in"])
        if change == "leave out":
            del out[place : place + size]
        else:
            source = out if change == "repeat" else random.choice(bodies)
            start = random.randint(0, len(source))
            out[place:place] = source[start : start + size]
    return out


def same_calls(parsed: list[list[str]], wanted: list[list[Any]]) -> bool:
    """Return whether two lists of [name, arguments] are equal.

    Parsed arguments are text. Wanted arguments are text or a JSON value. If they are a JSON value, the parsed text is
    decoded before the comparison. Raises ValueError if the text to decode is not JSON.
    """
    return len(parsed) == len(wanted) and all(
        name == wanted_name and (arguments if isinstance(given, str) else json.loads(arguments)) == given
        for (name, arguments), (wanted_name, given) in zip(parsed, wanted, strict=True)
    )


def merged(parsed: Json) -> Json:
    """Return a parsed answer with the pieces of each tool call joined as [name, arguments].

    White space around the text and the reasoning is removed.
    """
    calls: dict[int, list[str]] = {}
    for delta in parsed["calls"]:
        name, arguments = calls.get(delta["index"], ["", ""])
        calls[delta["index"]] = [name + (delta["name"] or ""), arguments + delta["arguments"]]
    return {
        "text": parsed["text"].strip(),
        "reasoning": parsed["reasoning"].strip(),
        "calls": [calls[index] for index in sorted(calls)],
        "finish": parsed["finish"],
    }


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints is no reply

    def send(reply: Json) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    worker = ParserWorker(ServedModel(sys.argv[1]))
    send(worker.greeting())
    for line in sys.stdin:
        try:
            reply = worker.reply(json.loads(line))
        except Exception as error:  # noqa: BLE001  it is reported to the caller
            reply = {"error": f"{type(error).__name__}: {error}"}
        send(reply)


if __name__ == "__main__":
    main()
