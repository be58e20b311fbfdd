"""The local engine: Transformers and PyTorch in this process, behind the same interface as an inference server.

The event loop renders, submits and parses; a worker thread (scheduler.py) owns the model. Log-probabilities are fp32
and of the distribution that was sampled from (sampler.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version as installed
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import AutoTokenizer

from polar_proxy.engines.base import Engine
from polar_proxy.engines.hermes import HermesParser
from polar_proxy.engines.local import grammar
from polar_proxy.engines.local.grammar import GrammarCompiler, GrammarMask
from polar_proxy.engines.local.kv_cache import ids_array
from polar_proxy.engines.local.model import ModelRunner
from polar_proxy.engines.local.params import SamplingDefaults, resolve
from polar_proxy.engines.local.sampling import SequenceSampler
from polar_proxy.engines.local.scheduler import BatchScheduler
from polar_proxy.engines.local.template import ChatTemplate, uses_tools
from polar_proxy.engines.local.tokenizer import Vocabulary
from polar_proxy.engines.local.work import Generation, PrefillStarted, ResultQueue, SampledToken
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import (
    ChatRequest,
    EngineInfo,
    EngineRequest,
    SampleEvent,
    TextRequest,
    TokenIds,
    ToolDelta,
    TopLogprob,
)

SMALL_MODEL = 20_000_000
"""Up to so many parameters one thread is as fast as many, and far faster when the other cores are busy."""


_TAIL = 16
"""Tokens at the end of a prompt in which it is seen whether it opens the reasoning."""


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """Everything that exists between entering and leaving the engine."""

    info: EngineInfo
    runner: ModelRunner
    vocabulary: Vocabulary
    template: ChatTemplate
    grammars: GrammarCompiler
    defaults: SamplingDefaults
    scheduler: BatchScheduler


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A request as tokens; for a conversation with one parser for each choice."""

    prompt: list[int]
    parsers: list[HermesParser] | None = None
    grammar: Callable[[], GrammarMask] | None = None


class LocalEngine(Engine):
    """Serves the model folder `model_path` (weights, config, fast tokenizer with a chat template).

    `max_batch` choices run at once, more wait. `kv_bytes` bounds the keys and values kept of finished sequences; those
    of the running batch come on top. `threads` is PyTorch's number of threads for the model
    (default: one for a small model, else PyTorch's own). `seed` makes requests
    without a seed of their own repeatable in order.
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
        self._loaded: _LoadedModel | None = None

    # Lifetime

    async def __aenter__(self) -> Self:
        self._loaded = await asyncio.to_thread(self._load)
        self._loaded.scheduler.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.scheduler.close)

    def _load(self) -> _LoadedModel:
        if not (self._path / "config.json").is_file():
            raise EngineError(f"No model at {self._path}: there is no config.json.", status=500)
        tokenizer: Any = AutoTokenizer.from_pretrained(self._path)
        if not tokenizer.is_fast:
            raise EngineError(f"The model at {self._path} has no fast tokenizer (tokenizer.json).", status=500)
        runner = ModelRunner.load(self._path)
        vocabulary = Vocabulary(tokenizer)
        template = ChatTemplate(tokenizer)
        eos = _eos_ids(runner.model, tokenizer)
        capabilities = {"token_ids", "logprobs", "token_prompt", "score", "continue", "weight_versions"}
        if template.tools:
            capabilities.add("tools")
        if grammar.available():
            capabilities |= {"json_schema", "tool_choice_required"} if template.tools else {"json_schema"}
        info = EngineInfo(
            engine="local",
            version=f"transformers {installed('transformers')}, torch {installed('torch')}",
            model=self._name,
            context_length=runner.context_length,
            template_hash=template.hash,
            logprob_mode="processed",
            capabilities=frozenset(capabilities),
            eos_token_ids=tuple(sorted(eos)),
        )
        scheduler = BatchScheduler(
            runner,
            vocabulary,
            eos,
            max_batch=self._max_batch,
            kv_bytes=self._kv_bytes,
            threads=self._threads or (1 if runner.parameters < SMALL_MODEL else None),
        )
        grammars = GrammarCompiler(tokenizer, runner.vocab_size, eos)
        return _LoadedModel(info, runner, vocabulary, template, grammars, SamplingDefaults.of(runner.model), scheduler)

    @property
    def _now(self) -> _LoadedModel:
        if self._loaded is None:
            raise EngineError("The local engine has not been entered: use `async with engine`.", status=503)
        return self._loaded

    @property
    def info(self) -> EngineInfo:
        return self._now.info

    async def health(self) -> str | None:
        if self._loaded is None:
            return "not loaded"
        return self._loaded.scheduler.failure

    # Text and tokens

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        template = self._now.template
        return await asyncio.to_thread(lambda: template.encode(template.render(request, generation=generation)))

    async def decode(self, token_ids: Sequence[int]) -> str:
        return self._now.vocabulary.decode(token_ids)

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: TokenIds | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        loaded = self._now
        prepared = await asyncio.to_thread(self._prepare, request, prompt)
        work = self._work(request, prepared)
        loaded.scheduler.submit(work)
        try:
            async with aclosing(self._events(work, prepared.parsers)) as events:
                async for event in events:
                    yield event
        finally:
            work.cancelled = True
            loaded.scheduler.wake()

    def _prepare(self, request: EngineRequest, prompt: TokenIds | None) -> _PreparedRequest:
        """Render, tokenise, compile grammars. In a thread: all of it can take long. Raises RequestError."""
        template = self._now.template
        if isinstance(request, TextRequest):
            if prompt is not None:
                return _PreparedRequest(prompt.tolist())
            ids = template.encode_plain(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
            return _PreparedRequest(ids)
        if request.sampling.n < 1:
            raise RequestError("n must be at least 1.", param="n")
        if prompt is None:
            text = template.render(request)
            ids = template.encode(text)
        else:
            ids = prompt.tolist()
            text = self._now.vocabulary.decode(ids[-_TAIL:])
        tools, reasoning = uses_tools(request), template.reasoning(text)
        parsers = [HermesParser(tools=tools, reasoning=reasoning) for _ in range(request.sampling.n)]
        return _PreparedRequest(ids, parsers, self._now.grammars.for_request(request, reasoning))

    def _work(self, request: EngineRequest, prepared: _PreparedRequest) -> Generation:
        """Check and complete what was asked. Raises RequestError."""
        loaded, sampling, prompt = self._now, request.sampling, prepared.prompt
        limit, vocab = loaded.runner.context_length, loaded.runner.vocab_size
        if not prompt:
            raise RequestError("The prompt is empty.", param="prompt")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise RequestError(f"The prompt has token ids outside of this model's 0..{vocab - 1}.", param="prompt")
        if len(prompt) >= limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, your request has {len(prompt)} "
                "input tokens. Please reduce the length of the input messages.",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        params, max_tokens = resolve(sampling, loaded.defaults, vocab, limit - len(prompt))
        seed = self._seeds.getrandbits(62) if sampling.seed is None else sampling.seed
        return Generation(
            prompt=ids_array(prompt),
            samplers=[
                SequenceSampler(params, seed + index, vocab, prepared.grammar() if prepared.grammar else None)
                for index in range(sampling.n)
            ],
            max_tokens=max_tokens,
            stop=sampling.stop,
            outbox=ResultQueue(asyncio.get_running_loop()),
        )

    async def _events(self, work: Generation, parsers: list[HermesParser] | None) -> AsyncGenerator[SampleEvent, None]:
        open_choices = len(work.samplers)
        while open_choices:
            choices: dict[int, list[SampledToken]] = {}
            for item in await work.outbox.take():
                if isinstance(item, EngineError):
                    raise EngineError(str(item), status=item.status) from item
                if isinstance(item, PrefillStarted):
                    yield SampleEvent(prompt_ids=tuple(work.prompt.tolist()), cached_tokens=item.cached_tokens)
                else:
                    choices.setdefault(item.choice, []).append(item)
            for index, pieces in choices.items():
                open_choices -= pieces[-1].finish is not None
                for _, run in groupby(pieces, key=lambda piece: piece.version):  # one, unless the weights changed
                    yield self._event(index, list(run), parsers[index] if parsers else None)

    def _event(self, index: int, pieces: Sequence[SampledToken], parser: HermesParser | None) -> SampleEvent:
        """Pieces of one choice, in order, as one event."""
        name = self._now.vocabulary.text
        text, reasoning = "".join([piece.text for piece in pieces]), ""
        tool_calls: tuple[ToolDelta, ...] = ()
        finish = pieces[-1].finish
        if parser is not None:
            parsed = parser.feed(text)
            text, reasoning, tool_calls = parsed.text, parsed.reasoning, parsed.tool_calls
            if finish is not None:
                rest = parser.close()
                text, reasoning = text + rest.text, reasoning + rest.reasoning
                tool_calls += rest.tool_calls
                finish = "tool_calls" if finish == "stop" and parser.calls else finish
        return SampleEvent(
            index=index,
            text=text,
            reasoning=reasoning,
            tool_calls=tool_calls,
            token_ids=tuple([piece.token_id for piece in pieces]),
            logprobs=tuple([piece.logprob for piece in pieces]),
            tokens=tuple([name(piece.token_id) for piece in pieces]),
            top=tuple(
                [tuple([TopLogprob(token, name(token), value) for token, value in piece.top]) for piece in pieces]
            ),
            finish_reason=finish,
            stop_sequence=pieces[-1].stop,
            weight_version=pieces[-1].version,
        )

    # Scoring and weights

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        loaded, ids = self._now, list(token_ids)
        if ids and (min(ids) < 0 or max(ids) >= loaded.runner.vocab_size):
            raise RequestError("There are token ids outside of this model's vocabulary.", param="token_ids")

        def parts() -> Generator[None, None, list[float]]:
            out: list[float] = []
            for part in loaded.runner.score(ids):
                out += part
                yield
            return out

        return await asyncio.wrap_future(loaded.scheduler.run_job(parts()))

    async def weight_version(self) -> str | None:
        return self._now.scheduler.version

    async def load_weights(self, source: Mapping[str, torch.Tensor] | Path | str, version: str) -> None:
        """Swap the weights between two steps: a state dict, or a safetensors file or a folder of them.

        Keys and values of the old weights are forgotten; answers in flight go on with the new weights, their past
        computed anew. Raises EngineError, and changes nothing, if the weights do not fit the model.
        """
        loaded = self._now
        weights = Path(source) if isinstance(source, str) else source

        def parts() -> Generator[None, None, None]:
            loaded.runner.load_weights(weights)
            loaded.scheduler.weights_changed(version)
            yield

        await asyncio.wrap_future(loaded.scheduler.run_job(parts()))


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the generation config's, else the model config's, and the tokenizer's own."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = model.config.eos_token_id
    ids = list(found) if isinstance(found, list | tuple) else [found]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
