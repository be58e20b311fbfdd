"""`local`: a Transformers model in this process, with the same interface as an inference server.

The event loop and its helper threads render, submit and parse; the worker thread of `BatchScheduler` owns the model.
Log-probabilities are fp32 and belong to the distribution that was sampled from (`sampling.py`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import AutoTokenizer

from polar_proxy.engines.base import Engine, ExactPrompt, uses_tools
from polar_proxy.engines.hermes import HermesParser, ParsedText
from polar_proxy.engines.local import grammar
from polar_proxy.engines.local.grammar import GrammarCompiler
from polar_proxy.engines.local.model import ModelRunner
from polar_proxy.engines.local.sampling import SequenceSampler, resolve
from polar_proxy.engines.local.scheduler import BatchScheduler, Generation, PrefillStarted, Result, SampledToken
from polar_proxy.engines.local.tokenizer import ChatTemplate, Vocabulary
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import (
    ChatRequest,
    EngineInfo,
    EngineRequest,
    SampleEvent,
    TextRequest,
    TopLogprob,
)

SMALL_MODEL = 20_000_000
"""Up to this many parameters one thread is as fast as several, and far faster when the other cores are busy."""
_PROMPT_TAIL = 16
"""Number of tokens at the end of an exact prompt that are searched for an open reasoning tag."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that exists between entering and leaving the engine."""

    info: EngineInfo
    runner: ModelRunner
    vocabulary: Vocabulary
    template: ChatTemplate
    grammars: GrammarCompiler
    generation_config: Mapping[str, Any]
    scheduler: BatchScheduler


class LocalEngine(Engine):
    """Serve the model folder `model_path`: config, safetensors weights and a fast tokenizer with a chat template.

    `max_batch` choices run at once; more wait. `kv_bytes` bounds the keys and values kept of finished sequences; those
    of the running batch come on top. `threads` is PyTorch's number of threads for the model (default: one for a small
    model, else PyTorch's own). `seed` makes requests without a seed repeatable.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        name: str | None = None,
        max_batch: int = 16,
        kv_bytes: int = 1 << 29,
        threads: int | None = None,
        seed: int | None = None,
    ) -> None:
        self._path = Path(model_path)
        self._name = name or self._path.resolve().name
        self._max_batch = max_batch
        self._kv_bytes = kv_bytes
        self._threads = threads
        self._seeds = random.Random(seed)
        self._loaded: LoadedModel | None = None

    async def __aenter__(self) -> Self:
        self._loaded = await asyncio.to_thread(self._load)
        self._loaded.scheduler.start(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.scheduler.close)

    def _load(self) -> LoadedModel:
        if not (self._path / "config.json").is_file():
            raise EngineError(f"There is no model in {self._path}: config.json is missing.", status=500)
        tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
        if not tokenizer.is_fast:
            raise EngineError(f"The model in {self._path} has no fast tokenizer (tokenizer.json).", status=500)
        runner = ModelRunner.load(self._path)
        vocabulary, template = Vocabulary(tokenizer), ChatTemplate(tokenizer)
        end_ids = _end_ids(runner.model, tokenizer)
        capabilities = {"token_ids", "logprobs", "token_prompt", "score", "continue", "weight_versions"}
        if template.has_tools:
            capabilities.add("tools")
        if grammar.available():
            capabilities |= {"json_schema", "tool_choice_required"} if template.has_tools else {"json_schema"}
        info = EngineInfo(
            engine="local",
            version=f"transformers {installed('transformers')}, torch {installed('torch')}",
            model=self._name,
            context_length=runner.context_length,
            template_hash=template.hash,
            logprob_mode="processed",
            capabilities=frozenset(capabilities),
            eos_token_ids=tuple(sorted(end_ids)),
        )
        scheduler = BatchScheduler(
            runner,
            vocabulary,
            end_ids,
            max_batch=self._max_batch,
            kv_bytes=self._kv_bytes,
            threads=self._threads or (1 if runner.parameter_count < SMALL_MODEL else None),
        )
        grammars = GrammarCompiler(tokenizer, runner.vocab_size, end_ids)
        generation_config = runner.model.generation_config.to_diff_dict()
        return LoadedModel(info, runner, vocabulary, template, grammars, generation_config, scheduler)

    @property
    def loaded(self) -> LoadedModel:
        """The parts of the loaded model. Raises EngineError before the engine is entered."""
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
        template = self.loaded.template
        return await asyncio.to_thread(lambda: template.encode(template.render(request, generation=generation)))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return self.loaded.vocabulary.decode(token_ids)

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        scheduler = self.loaded.scheduler
        seed = self._seeds.getrandbits(62) if request.sampling.seed is None else request.sampling.seed
        generation, parsers = await asyncio.to_thread(self._prepare, request, prompt, seed)
        scheduler.submit(generation)
        try:
            unfinished = len(generation.samplers)
            while unfinished:
                for event in self._events(generation, await generation.take(), parsers):
                    unfinished -= event.finish_reason is not None
                    yield event
        finally:
            generation.cancelled = True
            scheduler.wake()

    def _prepare(
        self, request: EngineRequest, prompt: ExactPrompt | None, seed: int
    ) -> tuple[Generation, list[HermesParser]]:
        """Render, tokenize and check a request, and compile its grammar. Runs in a thread, as all of it can take long.

        Returns the generation and, for a conversation, one answer parser per choice. Raises RequestError.
        """
        model, sampling = self.loaded, request.sampling
        parsers: list[HermesParser] = []
        new_mask = None
        if isinstance(request, TextRequest):
            given = request.prompt
            ids = model.template.encode_plain(given) if isinstance(given, str) else list(given)
        else:
            if prompt is None:
                text = model.template.render(request)
                ids = model.template.encode(text)
            else:
                ids = prompt.token_ids.tolist()
                text = model.vocabulary.decode(ids[-_PROMPT_TAIL:])
            reasoning = model.template.reasoning(text)
            parsers = [HermesParser(tools=uses_tools(request), reasoning=reasoning) for _ in range(sampling.n)]
            new_mask = model.grammars.for_request(request, reasoning)
        self._check_prompt(request, ids)
        vocab_size = model.runner.vocab_size
        params, max_tokens = resolve(
            sampling, model.generation_config, vocab_size, model.info.context_length - len(ids)
        )
        samplers = [
            SequenceSampler(params, seed + index, vocab_size, new_mask() if new_mask else None)
            for index in range(sampling.n)
        ]
        return Generation(np.asarray(ids, dtype=np.int32), samplers, max_tokens, sampling.stop), parsers

    def _check_prompt(self, request: EngineRequest, ids: Sequence[int]) -> None:
        limit, vocab_size = self.loaded.info.context_length, self.loaded.runner.vocab_size
        if not ids:
            raise RequestError("The prompt is empty.", param="prompt")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise RequestError(f"The prompt has token ids outside of this model's 0..{vocab_size - 1}.", param="prompt")
        if len(ids) >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your request has {len(ids)} "
                "input tokens. Please reduce the length of the input messages.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )

    def _events(
        self, generation: Generation, results: Sequence[Result], parsers: Sequence[HermesParser]
    ) -> Generator[SampleEvent, None, None]:
        """Turn the scheduler's results into events: one per choice and policy version. Raises the scheduler's error."""
        tokens: dict[int, list[SampledToken]] = {}
        for result in results:
            if isinstance(result, EngineError):
                raise EngineError(str(result), status=result.status) from result
            if isinstance(result, PrefillStarted):
                yield SampleEvent(prompt_ids=tuple(generation.prompt.tolist()), cached_tokens=result.cached_tokens)
            else:
                tokens.setdefault(result.choice, []).append(result)
        for index, of_choice in tokens.items():
            for _, run in groupby(of_choice, key=lambda token: token.version):
                yield self._event(index, list(run), parsers[index] if parsers else None)

    def _event(self, index: int, tokens: Sequence[SampledToken], parser: HermesParser | None) -> SampleEvent:
        """Join consecutive tokens of one choice into one event."""
        name = self.loaded.vocabulary.text
        last = tokens[-1]
        parsed = ParsedText("".join([token.text for token in tokens]), finish_reason=last.finish)
        if parser is not None:
            parsed = parser.parse(parsed.text, last.finish)
        return SampleEvent(
            index=index,
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            token_ids=tuple([token.token_id for token in tokens]),
            logprobs=tuple([token.logprob for token in tokens]),
            tokens=tuple([name(token.token_id) for token in tokens]),
            top=tuple([tuple([TopLogprob(id_, name(id_), value) for id_, value in token.top]) for token in tokens]),
            finish_reason=parsed.finish_reason,
            stop_sequence=last.stop,
            weight_version=last.version,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        model, ids = self.loaded, list(token_ids)
        if ids and (min(ids) < 0 or max(ids) >= model.runner.vocab_size):
            raise RequestError("There are token ids outside of this model's vocabulary.", param="token_ids")

        def parts() -> Generator[None, None, list[float]]:
            logprobs: list[float] = []
            for chunk in model.runner.score(ids):
                logprobs += chunk
                yield
            return logprobs

        return await asyncio.wrap_future(model.scheduler.run_task(parts()))

    async def weight_version(self) -> str | None:
        return self.loaded.scheduler.version

    async def load_weights(self, source: Mapping[str, torch.Tensor] | Path | str, version: str) -> None:
        """Replace the weights between two steps by a state dict, a safetensors file or a folder of such files.

        Keys and values of the old weights are dropped. Running answers continue with the new weights, and their past
        is computed again. Raises EngineError, and changes nothing, if the weights do not fit the model.
        """
        model = self.loaded
        weights = Path(source) if isinstance(source, str) else source

        def parts() -> Generator[None, None, None]:
            model.runner.load_weights(weights)
            model.scheduler.weights_changed(version)
            yield

        await asyncio.wrap_future(model.scheduler.run_task(parts()))


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: those of the generation or model config, and the tokenizer's own."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = model.config.eos_token_id
    ids = list(found) if isinstance(found, list | tuple) else [found]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
