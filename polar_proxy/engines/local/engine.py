"""`local`: a Transformers model that runs in this process, with the same interface as an inference server.

The event loop and its helper threads render, submit and parse; the worker thread of `BatchScheduler` owns the model.
Log-probabilities are fp32 and belong to the distribution that was sampled from (`sampling.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import AutoTokenizer

from polar_proxy.engines.base import Engine, ExactPrompt, uses_tools
from polar_proxy.engines.hermes import PROMPT_TAIL, HermesParser
from polar_proxy.engines.local.grammar import GrammarCompiler
from polar_proxy.engines.local.model import ModelRunner
from polar_proxy.engines.local.sampling import SequenceSampler, resolve
from polar_proxy.engines.local.scheduler import BatchScheduler, Generation
from polar_proxy.engines.local.tokenizer import ChatTokenizer
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import ChatRequest, EngineInfo, EngineRequest, SampleEvent, TextRequest


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The objects of the engine that exist only while the engine is entered (`async with`)."""

    info: EngineInfo
    runner: ModelRunner
    tokenizer: ChatTokenizer
    grammars: GrammarCompiler
    generation_config: Mapping[str, Any]
    scheduler: BatchScheduler


class LocalEngine(Engine):
    """The model in the folder `model_path`: config, safetensors weights, a fast tokenizer with a chat template.

    At most `max_batch` choices run at once; further ones wait. An answer has at most `max_answer` tokens, whatever a
    request asks for.
    """

    def __init__(
        self, model_path: Path | str, *, name: str | None = None, max_batch: int = 16, max_answer: int | None = None
    ) -> None:
        self._path = Path(model_path)
        self._name = name or self._path.resolve().name
        self._max_batch = max_batch
        self._max_answer = max_answer
        self._loaded: LoadedModel | None = None

    async def __aenter__(self) -> Self:
        self._loaded = await asyncio.to_thread(self._load, asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.scheduler.close)

    def _load(self, loop: asyncio.AbstractEventLoop) -> LoadedModel:
        if not (self._path / "config.json").is_file():
            raise EngineError(f"There is no model in {self._path}: config.json is missing.", status=500)
        tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
        if not tokenizer.is_fast:
            raise EngineError(f"The model in {self._path} has no fast tokenizer (tokenizer.json).", status=500)
        runner, chat = ModelRunner.load(self._path), ChatTokenizer(tokenizer)
        end_ids = _end_ids(runner.model, tokenizer)
        capabilities = {"token_ids", "logprobs", "token_prompt", "score", "continue", "weight_versions", "json_schema"}
        if chat.has_tools:
            capabilities |= {"tools", "tool_choice_required"}
        info = EngineInfo(
            engine="local",
            version=f"transformers {installed('transformers')}, torch {installed('torch')}",
            model=self._name,
            context_length=runner.context_length,
            template_hash=chat.template_hash,
            logprob_mode="processed",
            capabilities=frozenset(capabilities),
            eos_token_ids=tuple(sorted(end_ids)),
            precision="float32",
            max_answer=self._max_answer,
        )
        scheduler = BatchScheduler(runner, chat, end_ids, loop=loop, max_batch=self._max_batch)
        grammars = GrammarCompiler(tokenizer, runner.vocab_size, end_ids)
        return LoadedModel(info, runner, chat, grammars, runner.model.generation_config.to_diff_dict(), scheduler)

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model. Raises EngineError before the engine is entered."""
        if self._loaded is None:
            raise EngineError("The local engine is not loaded: use it as `async with engine:`.", status=503)
        return self._loaded

    @property
    def info(self) -> EngineInfo:
        return self.loaded.info

    async def health(self) -> str | None:
        if self._loaded is None:
            return "not loaded"
        return self._loaded.scheduler.failure

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        chat = self.loaded.tokenizer
        return await asyncio.to_thread(lambda: chat.encode(chat.render(request, generation=generation)))

    async def render_texts(self, requests: Sequence[ChatRequest], *, generation: bool = True) -> list[str]:
        chat = self.loaded.tokenizer
        return await asyncio.to_thread(lambda: [chat.render(request, generation=generation) for request in requests])

    async def encode(self, text: str) -> list[int]:
        return await asyncio.to_thread(self.loaded.tokenizer.encode, text)

    async def decode(self, token_ids: Sequence[int]) -> str:
        return self.loaded.tokenizer.decode(token_ids)

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        scheduler = self.loaded.scheduler
        seed = secrets.randbits(62) if request.sampling.seed is None else request.sampling.seed
        generation, parsers = await asyncio.to_thread(self._prepare, request, prompt, seed)
        scheduler.submit(generation)
        try:
            unfinished = len(generation.samplers)
            while unfinished:
                event = await generation.results.get()
                if isinstance(event, EngineError):
                    raise EngineError(str(event), status=event.status) from event
                unfinished -= event.finish_reason is not None
                yield parsers[event.index].parse(event) if parsers else event
        finally:
            generation.cancelled = True

    def _prepare(
        self, request: EngineRequest, prompt: ExactPrompt | None, seed: int
    ) -> tuple[Generation, list[HermesParser]]:
        """Render, tokenize and check a request, and compile its grammar.

        Runs in a thread, because each of these steps can take long. Returns the generation and, for a conversation, one
        answer parser per choice. Raises RequestError if the model cannot serve the request.
        """
        model, sampling = self.loaded, request.sampling
        parsers: list[HermesParser] = []
        new_mask = None
        if isinstance(request, TextRequest):
            given = request.prompt
            ids = model.tokenizer.encode(given, raw=True) if isinstance(given, str) else list(given)
        else:
            if prompt is None:
                text = model.tokenizer.render(request)
                ids = model.tokenizer.encode(text)
            else:
                ids = prompt.token_ids.tolist()
                text = model.tokenizer.decode(ids[-PROMPT_TAIL:])
            reasoning = model.tokenizer.reasoning(text)
            parsers = [HermesParser(tools=uses_tools(request), reasoning=reasoning) for _ in range(sampling.n)]
            new_mask = model.grammars.for_request(request, reasoning)
        self._check_prompt(request, ids)
        vocab_size = model.runner.vocab_size
        room = model.info.context_length - len(ids)
        if model.info.max_answer is not None:
            room = min(room, model.info.max_answer)
        sampling, max_tokens = resolve(sampling, model.generation_config, vocab_size, room)
        samplers = [
            SequenceSampler(sampling, seed + index, vocab_size, new_mask() if new_mask else None, ids)
            for index in range(sampling.n)
        ]
        return Generation(np.asarray(ids, dtype=np.int32), samplers, max_tokens, sampling.stop), parsers

    def _check_prompt(self, request: EngineRequest, ids: Sequence[int]) -> None:
        limit, vocab_size = self.loaded.info.context_length, self.loaded.runner.vocab_size
        if not ids:
            raise RequestError("The prompt is empty.", param="prompt")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise RequestError(f"The prompt has token ids outside of the range 0..{vocab_size - 1}.", param="prompt")
        if len(ids) >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your request has {len(ids)} "
                "input tokens. Please reduce the length of the input messages.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        model, ids = self.loaded, list(token_ids)
        if ids and (min(ids) < 0 or max(ids) >= model.runner.vocab_size):
            raise RequestError("There are token ids outside of this model's vocabulary.", param="token_ids")
        chunks = model.runner.score(ids, temperature)
        logprobs: list[float] = []
        while chunk := await asyncio.wrap_future(model.scheduler.run(lambda: next(chunks, None))):
            logprobs += chunk
        return logprobs

    async def weight_version(self) -> str | None:
        return self.loaded.scheduler.version

    async def load_weights(self, source: Mapping[str, torch.Tensor] | Path | str, version: str) -> None:
        """Replace the weights, between two sampling steps, and report the policy version `version` from then on.

        `source`: a state dict, a safetensors file or a folder of such files. The key-value cache of running answers is
        computed again, and they continue with the new weights. Raises EngineError, and changes nothing, if the weights
        do not have the model's names and shapes.
        """
        model = self.loaded
        weights = Path(source) if isinstance(source, str) else source

        def load() -> None:
            model.runner.load_weights(weights)
            model.scheduler.weights_changed(version)

        await asyncio.wrap_future(model.scheduler.run(load))


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the end tokens of the generation config (or, if it has none, of the model
    config), and the end token of the tokenizer."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = model.config.eos_token_id
    ids = list(found) if isinstance(found, list | tuple) else [found]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
