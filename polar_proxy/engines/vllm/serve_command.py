"""Find the `vllm serve` command for a model, with the parsers that read answers in the format of its chat template.

No server is needed. The model's template writes sample answers with reasoning and tool calls (`target_answers.py`).
vLLM's parsers are tried on the tokens of these answers in a side process (`parser_process.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from polar_proxy.engines.chat_template import MessageForm, ModelFiles, find_model_folder
from polar_proxy.engines.vllm.answer_parser import parser_request
from polar_proxy.engines.vllm.parser_process import ParserProcess, Parsers, find_vllm_python
from polar_proxy.engines.vllm.target_answers import ARGUMENTS, CONTENT, REASONING, TOOL, USER, after_call, call_turn
from polar_proxy.errors import EngineError, RequestError, UsageError
from polar_proxy.sequences import first_difference
from polar_proxy.types import ChatRequest, Json, Message


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A command that serves a model so that Polar can record and continue its conversations."""

    model: str
    vllm_version: str
    parsers: tuple[Parsers, ...]
    """Pairs (tool parser, reasoning parser) that read answers in the template's format, the best first; at least one.

    The tool parser is None if the template shows no tool calls, the reasoning parser None if answers have no reasoning.
    """

    @property
    def line(self) -> str:
        tool, reasoning = self.parsers[0]
        flags = [] if tool is None else ["--enable-auto-tool-choice", "--tool-call-parser", tool]
        flags += [] if reasoning is None else ["--reasoning-parser", reasoning]
        return shlex.join(["vllm", "serve", self.model, *flags])


async def find_serve_command(model: str, vllm_python: str | None = None) -> ServeCommand:
    """Return the command for `model`, which is a folder or a name in the Hugging Face cache.

    `vllm_python` is the Python of an environment with vLLM. If it is None, the Python of the `vllm` command is used, or
    else this process's own. Raises UsageError if the model's files, the package tokenizers or vLLM are not on this
    machine. Raises EngineError if vLLM cannot load the model's configuration, or has no parser for answers in the
    template's format.
    """
    folder = await asyncio.to_thread(find_model_folder, model)
    files = await asyncio.to_thread(ModelFiles.load, folder) if folder is not None else None
    if files is None:
        raise UsageError(
            f"The chat template and tokenizer.json of {model!r} cannot be read: the files are not on this machine, or "
            "the package tokenizers is missing (pip install 'polar-proxy[local]')."
        )
    python = find_vllm_python(vllm_python)
    if python is None:
        raise UsageError("vLLM was not found: install it, or name its Python by the setting engine.vllm_python.")
    template = _Template(files)
    samples = template.samples()
    async with ParserProcess(python, str(folder)) as process:
        tools = (TOOL,) if any(sample["calls"] for sample in samples) else ()
        request = parser_request(model, ChatRequest("", (), tools=tools))
        found = await process.match(request, samples)
        if not found:
            raise EngineError(
                f"No parser of vLLM {process.version} reads answers in the format of the chat template of {model}: use "
                "a vLLM version that supports this model, or another model."
            )
        return ServeCommand(model, process.version, tuple(found))


class _Template:
    """A model's chat template, which renders conversations and sample answers to token ids."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._form = self._find_form()

    def samples(self) -> list[Json]:
        """Return sample answers, as the template renders them, for `ParserProcess.match`.

        Each consists of constant reasoning, text and tool calls. Half of them reply to a first user message, the others
        to a tool's result. A sample that the template refuses, or whose tool calls it does not render, is left out. If
        the template does not render the reasoning, the sample's reasoning is "".
        """
        out = []
        answers = ((), CONTENT), (ARGUMENTS[:1], ""), (ARGUMENTS[1:], CONTENT), (ARGUMENTS, "")
        for messages, (arguments, content) in product((USER, after_call(USER)), answers):
            with contextlib.suppress(RequestError):
                out.append(self._sample(messages, arguments, content))
        return out

    def _sample(self, messages: list[Json], arguments: Sequence[Json], content: str) -> Json:
        prompt = self._ids(messages, generation=True)
        ids = self._answer(messages, prompt, call_turn(arguments, content) | {"reasoning_content": REASONING})
        text = str(self._files.tokenizer.decode(ids, skip_special_tokens=False))
        if not all(name in text for each in arguments for name in each):
            raise RequestError("The model's chat template does not render this tool call.")
        return {
            "prompt": prompt,
            "ids": ids,
            "chunks": None,
            "contains_call": bool(arguments),
            "text": content,
            "reasoning": REASONING if REASONING in text else "",
            "calls": [[TOOL["function"]["name"], each] for each in arguments],
            "raw_finish": "stop",
            "finish": "tool_calls" if arguments else "stop",
        }

    def _answer(self, messages: list[Json], prompt: list[int], turn: Json) -> list[int]:
        """Return the ids of an answer, with the token that ends it. Raises RequestError if the template refuses it."""
        whole = self._ids([*messages, turn])
        start = first_difference(prompt, whole)
        end = next((place for place in range(start, len(whole)) if whole[place] in self._files.stop_ids), None)
        if end is None:
            text = (
                "The model's chat template does not end answers with a stop token: add the token that it writes after "
                "an answer to eos_token_id in generation_config.json."
            )
            raise UsageError(text)
        return whole[start : end + 1]

    def _find_form(self) -> MessageForm:
        """Return the `MessageForm` that the template needs: message content as a string, or as a list of parts.

        Raises UsageError if the template renders the text of a user message in neither form.
        """
        for form in (MessageForm(), MessageForm(content_parts=True)):
            with contextlib.suppress(RequestError):
                if USER[0]["content"] in self._files.template.render(_request(USER), form):
                    return form
        raise UsageError(
            "The model's chat template leaves out the text of user messages, so no parsers can be found for it: use a "
            "model with a chat template for conversations."
        )

    def _ids(self, messages: list[Json], *, generation: bool = False) -> list[int]:
        text = self._files.template.render(_request(messages), self._form, generation=generation)
        return self._files.encode(text)


def _request(messages: list[Json]) -> ChatRequest:
    return ChatRequest("", tuple(map(Message.from_openai, messages)), tools=(TOOL,))
