"""`vllm`: vLLM's OpenAI server over HTTP, recorded with exact token ids and log-probabilities.

Conversations go to `/v1/chat/completions` and raw prompts to `/v1/completions`, both with `return_token_ids` and
log-probabilities. When the engine is entered, it verifies that the server returns ids and log-probabilities
(`probe.py`). If the server does not, entering fails.

A conversation that continues from exact ids goes to `/v1/completions`, too. Polar parses the answer as the chat route
would (`answer_parser.py`), with a parser that was compared with this route. If no parser agrees with the route, no
conversation is continued, and `continue_problem` says why.

An answer of the chat route is streamed from the server if the client streams or the request has tools. Without tools, a
client that does not stream is served from one JSON object, which costs much less than a stream of many chunks. With
tools, the object and the stream may differ if `max_tokens` cuts a tool call: only one of the two then has the call, the
other has its raw text. The answer must not depend on whether the agent streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import TracebackType

from polar_proxy.engines.base import CannotContinueError, EngineLoad, ExactPrompt, is_constrained, uses_tools
from polar_proxy.engines.chat_template import ModelFiles, find_model_folder
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.local_rendering import LocallyRenderingEngine, LocalRenderer
from polar_proxy.engines.openai_client import not_open
from polar_proxy.engines.openai_stream import ChunkDecoder
from polar_proxy.engines.vllm.answer_parser import AnswerParser, has_strict_tool, make_answer_parser
from polar_proxy.engines.vllm.client import (
    CHAT,
    COMPLETIONS,
    TokenTexts,
    VllmClient,
    chat_body,
    exact_body,
    render_body,
    text_body,
)
from polar_proxy.engines.vllm.parser_process import find_vllm_python, read_parsers
from polar_proxy.engines.vllm.parser_proof import ParserProofs
from polar_proxy.engines.vllm.probe import ServerProbe, VerifiedServer, stops_at
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, Json, SampleEvent, Sampling, TokenIds

log = logging.getLogger(__name__)

WEIGHT_VERSION_SECONDS = 1.0
"""Seconds for which a policy version is used without asking the server again."""


@dataclass(frozen=True, slots=True)
class VllmPrompt(ExactPrompt):
    """Accepted prompt ids of one call, with the parser of its answer."""

    parser: AnswerParser

    @property
    def constrained(self) -> bool:
        return self.parser.constrained


class VllmEngine(LocallyRenderingEngine):
    """An engine behind a vLLM server.

    `async with VllmEngine("http://127.0.0.1:8000") as engine:` connects to the server and verifies it.
    Entering raises EngineError if the server cannot be reached, serves another model, or does not return token ids and
    log-probabilities.
    """

    client: VllmClient
    _verified: VerifiedServer | None = None

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        model_folder: str | None = None,
        vllm_python: str | None = None,
        vllm_parsers: str | None = None,
        client: VllmClient | None = None,
    ) -> None:
        """`model` may be left out if the server serves one model. `api_key` is sent as a bearer token.
        `model_folder` has the model's files, if the server's own folder is on another machine. `vllm_python` is the
        Python of an environment with vLLM, by default that of the `vllm` command. `vllm_parsers` names the server's
        parsers as TOOL/REASONING. `client` replaces the client that is otherwise made of `url`, `api_key` and
        `model`."""
        self.client = client or VllmClient(url, api_key, model=model)
        self._probe = ServerProbe(self.client, find_vllm_python(vllm_python), read_parsers(vllm_parsers), model_folder)
        self._weight_version: str | None = None
        self._weight_version_at = self._weights_changed_at = 0.0

    async def _connect(self) -> EngineInfo:
        self._verified = await self._probe.run()
        self._weight_version = self._server.weight_version
        self._weight_version_at = time.monotonic()
        await self._use_model_files()
        self._texts = TokenTexts(self.client, separator=next(iter(self._server.info.eos_token_ids), None))
        return self._server.info

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._probe.close()
        await super().__aexit__(kind, error, trace)

    async def _use_model_files(self) -> None:
        """Render conversations in this process, if the model's folder can be read and rendering gives the server's ids.

        The stop tokens of the model's `generation_config.json` are added to the tokens that end a turn, if the server
        really stops at them.
        """
        if not self._server.renders or "continue" not in self._server.info.capabilities:
            return
        if self.client.renderer is not None:
            stop_ids: Sequence[int] = self.client.renderer.stop_ids
        elif (files := await self._model_files()) is not None:
            self._local = await LocalRenderer.find(files.template, self.render, files.encode)
            stop_ids = files.stop_ids
        else:
            return
        known = self._server.info.eos_token_ids
        named = [token for token in stop_ids if token not in known and await stops_at(self.client, token)]
        self._verified = replace(self._server, info=replace(self._server.info, eos_token_ids=(*known, *named)))

    async def _model_files(self) -> ModelFiles | None:
        folder = await asyncio.to_thread(find_model_folder, self._server.model_path)
        if folder is None:
            log.warning(
                "the model's folder %s is not on this machine, so the server renders each conversation several times. "
                "Name a copy of its configuration, tokenizer and chat template by the setting engine.model_folder",
                self._server.model_path,
            )
        return await asyncio.to_thread(ModelFiles.load, folder) if folder is not None else None

    @property
    def _server(self) -> VerifiedServer:
        if self._verified is None:
            raise not_open()
        return self._verified

    @property
    def continue_problem(self) -> str | None:
        parsers = self._server.parsers
        return None if isinstance(parsers, ParserProofs) else str(parsers)

    async def accept_prompt(self, request: ChatRequest, token_ids: TokenIds) -> VllmPrompt:
        """Implement `Engine.accept_prompt`.

        Template options that this engine has not seen before are verified first. This takes about as long as sampling a
        few dozen tokens.
        """
        if is_constrained(request, self.info):
            raise CannotContinueError("a grammar constrains the answer; the server allows this on its chat route only.")
        parsers = self._server.parsers
        if not isinstance(parsers, ParserProofs):
            raise CannotContinueError(parsers.reason)
        config = await parsers.config_for(request.template_kwargs, token_ids)
        parser = make_answer_parser(self.client, request, token_ids, config, parsers.process)
        return VllmPrompt(token_ids, parser)

    async def constrains(self, request: EngineRequest) -> bool:
        if not isinstance(request, ChatRequest) or not uses_tools(request):
            return False
        parsers = self._server.parsers
        if isinstance(parsers, ParserProofs):
            return await parsers.constrains(request)
        return self._server.adds_grammar or has_strict_tool(request)

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        if prompt is not None and not (isinstance(prompt, VllmPrompt) and isinstance(request, ChatRequest)):
            raise TypeError("`prompt` must be made by this engine's accept_prompt, and `request` must be a ChatRequest")
        decoder = ChunkDecoder(request.sampling, self.client.name)
        if prompt is None and isinstance(request, ChatRequest):
            stream = stream or bool(request.tools)  # see the module docstring
        path, body = await self.client.thread.run(request.large, self._request, request, stream, prompt)
        try:
            if prompt is not None:
                body = await prompt.parser.open(body)
            response = await self._start(path, body, large=request.large)
            async with aclosing(self.client.events(response, decoder, stream=stream)) as steps:
                async for events in steps:
                    for event in await self._complete(events, request, prompt):
                        yield event
        finally:
            if prompt is not None:
                prompt.parser.close()

    def _request(self, request: EngineRequest, stream: bool, prompt: VllmPrompt | None) -> tuple[str, Json]:
        if not isinstance(request, ChatRequest):
            return COMPLETIONS, text_body(request, stream=stream)
        if prompt is None:
            return CHAT, chat_body(request, stream=stream)
        limit = self.info.context_length
        return COMPLETIONS, exact_body(request, prompt.token_ids, limit, stream=stream)

    async def _start(self, path: str, body: Json, *, large: bool) -> HttpResponse:
        """Send the request; if `max_tokens` exceeds the room in the context, send it without a limit.

        Agents request the maximum of their own provider's models, which is more than small models can write. Other
        servers lower this number to the room in the context; vLLM refuses the request.
        """
        if "weight_versions" in self.info.capabilities:
            body["return_weight_versions"] = True
        try:
            return await self.client.post(path, body, large=large)
        except RequestError as error:
            if error.code != "context_length_exceeded" or "max_tokens" not in str(error) or "max_tokens" not in body:
                raise
        unlimited = {key: value for key, value in body.items() if key != "max_tokens"}
        return await self.client.post(path, unlimited, large=large)

    async def _complete(
        self, events: list[SampleEvent], request: EngineRequest, prompt: VllmPrompt | None
    ) -> list[SampleEvent]:
        """Add to an answer's events the texts of alternative tokens, if the request has `top_logprobs`.

        If `prompt` is given, the call used the completions route. The server does not parse the text of a completion,
        so its reasoning and tool calls are parsed here. Raises EngineError if the server did not use the ids of
        `prompt`.
        """
        if events and request.sampling.top_logprobs:
            events = await self._texts.add_texts(events)
        if prompt is None:
            return events
        for event in events:
            if event.prompt_ids is not None and list(event.prompt_ids) != prompt.token_ids.tolist():
                raise EngineError(
                    f"{self.client.name} did not use the prompt tokens that it was given: the prompt ids in its answer "
                    "differ."
                )
        return [await prompt.parser.parse(event) for event in events]

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        """Implement `Engine.render`. If the probe found that `VllmClient.render` returns the chat route's ids, use it.

        Otherwise, let the chat route sample one token, and return the prompt ids from the answer.
        """
        if self._server.renders:
            return await self.client.render(render_body(request, generation=generation))
        if not generation:
            raise RequestError(
                f"{self.client.name} can render a conversation only with the tokens that open the next answer."
            )
        one_token = replace(request, sampling=Sampling(max_tokens=1), response_format=None)
        answer = await self.client.chat(chat_body(one_token, stream=False))
        return list(self.client.field(answer, "prompt_token_ids"))

    async def _texts_of_server(self, requests: Sequence[ChatRequest], generation: bool) -> list[str]:
        if self.client.renderer is None:
            return await super()._texts_of_server(requests, generation)
        bodies = [{"model": self.client.model, **render_body(one, generation=generation)} for one in requests]
        return [rendering.text for rendering in await self.client.renderer.render(bodies)]

    async def encode(self, text: str) -> list[int]:
        return await (self.client if self._local is None else self._local).encode(text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return await self.client.decode(token_ids)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Implement `Engine.score`. The server samples one more token, so the context must have room for it."""
        ids = [int(token) for token in token_ids]
        if len(ids) < 2:
            return []
        if "score" not in self.info.capabilities:
            raise RequestError(f"{self.client.name} does not return the log-probabilities of a prompt.")
        return await self.client.score(ids, temperature)

    async def load(self) -> EngineLoad | None:
        return await self.client.load()

    async def weight_version(self) -> str | None:
        """Return the policy version from `/weight_info`, at most a second old; None if the server has no such route.

        (vLLM has the route in development mode.) Every recorded call needs the version, and a request for each call
        would cost as much as the rest of its recording. A version that is up to a second old is still right: whoever
        updates the weights pauses the engine for longer than a second, or calls `weights_changed` during the pause.
        """
        if self._weight_version is None:
            return None
        now, known_since = time.monotonic(), self._weight_version_at
        if known_since <= self._weights_changed_at or now - known_since > WEIGHT_VERSION_SECONDS:
            self._weight_version = await self.client.weight_version()
            self._weight_version_at = now
        return self._weight_version

    def weights_changed(self) -> None:
        """Discard the cached policy version. The next call of `weight_version` asks the server for the version."""
        self._weights_changed_at = time.monotonic()
