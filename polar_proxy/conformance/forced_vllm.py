"""A vLLM engine that samples given texts; everything except the choice of tokens is the real server's.

Template, tokenizer, parsers, prompts and log-probabilities are vLLM's own. Each request, for a conversation or for an
exact prompt, carries the tokens to sample. A plugin in the server (`vllm_plugin/polar_forced_tokens.py`) reads them.
`make_model` and `save_random_model` write models for such a server.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sysconfig
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

from polar_proxy.config import EngineSettings
from polar_proxy.conformance.awkward_answers import qwen_text, split_randomly
from polar_proxy.engines.base import Engine, ExactPrompt
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.http_client import HttpResponse
from polar_proxy.engines.scripted import Script, ScriptedEngine, ScriptedReply
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.engines.vllm.client import CHAT, COMPLETIONS, VllmClient
from polar_proxy.errors import EngineError, UsageError
from polar_proxy.types import EngineRequest, Json, SampleEvent

PLUGIN = Path(__file__).resolve().with_name("vllm_plugin")
"""Folder of the plugin. The server needs PYTHONPATH with this folder, and `--logits-processors` LOGITS_PROCESSOR."""
LOGITS_PROCESSOR = "polar_forced_tokens:ForcedTokens"
CUT_EVERY = 40
"""Average number of characters between two cuts. An answer is cut at random places before it is tokenized, so that its
tokens differ from the tokenizer's own choice."""


TEMPLATES = {
    "keeps": None,
    "strips": Path(__file__).with_name("strips_reasoning.jinja"),
}
"""Chat templates. `keeps`: the model's own, which shows the reasoning of every turn. `strips`: a template that shows
only the reasoning after the last user message."""

_VOCABULARY = 12_000
_CONTEXT = 262_144
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_WORD = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which the tokenizers of the Qwen family split text into words."""
_READ_BYTES = 3_000_000


async def forced_reply(script: Script, request: EngineRequest) -> ScriptedReply:
    """Return the script's reply after its `wait` seconds, or raise the reply's `error`.

    The error comes before any answer, because a real server cannot be made to fail in the middle of an answer.
    """
    reply = ScriptedReply.of(script(request))
    await asyncio.sleep(reply.wait)
    if reply.error is not None:
        raise reply.error
    return reply


class _ForcingClient(VllmClient):
    """A client that adds two fields to request bodies: a chat template, and the tokens that the server must sample."""

    def __init__(self, url: str, *, model: str | None, template: str | None) -> None:
        super().__init__(url, model=model)
        self._template = template
        self._forced_ids: tuple[int, ...] = ()

    def forcing(self, ids: tuple[int, ...]) -> _ForcingClient:
        """Return a copy of this client, on the same connections, that makes the server sample `ids`."""
        client = copy.copy(self)
        client._forced_ids = ids
        return client

    async def send(self, method: str, path: str, body: Json | None = None, **options: Any) -> HttpResponse:
        if body is not None:
            if self._template is not None and "messages" in body:
                body = {**body, "chat_template": self._template}
            if self._forced_ids and path in (CHAT, COMPLETIONS):
                body = {**body, "vllm_xargs": {"forced_ids": list(self._forced_ids)}}
        return await super().send(method, path, body, **options)


class ForcedVllmEngine(VllmEngine):
    """A vLLM server that samples the answers of `script(request)`.

    Entering raises EngineError if the server lacks the plugin. `template` replaces the model's chat template. The
    server must then run with `--trust-request-chat-template`. `cut_every` is the argument `every` of `split_randomly`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        script: Script | None = None,
        template: str | None = None,
        cut_every: int = CUT_EVERY,
        vllm_python: str | None = None,
        vllm_parsers: str | None = None,
    ) -> None:
        self._forcing_client = _ForcingClient(url, model=model, template=template)
        super().__init__(url, vllm_python=vllm_python, vllm_parsers=vllm_parsers, client=self._forcing_client)
        self.script: Script = script or (lambda request: ScriptedReply("This is vLLM with a scripted answer."))
        self._cut_every = cut_every
        self._piece_ids: dict[str, list[int]] = {}

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        try:
            await self._verify_plugin()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def sample(
        self, request: EngineRequest, *, stream: bool = True, prompt: ExactPrompt | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        reply = await forced_reply(self.script, request)
        forced = copy.copy(self)
        forced.client = self._forcing_client.forcing(await self.answer_tokens(request, reply))
        async with aclosing(VllmEngine.sample(forced, request, stream=stream, prompt=prompt)) as events:
            async for event in events:
                yield event

    async def answer_tokens(self, request: EngineRequest, reply: ScriptedReply) -> tuple[int, ...]:
        """Return the token ids to sample for a reply. This implementation writes replies as Qwen models do."""
        return await self.tokens(qwen_text(reply))

    async def tokens(self, text: str) -> tuple[int, ...]:
        """Return the token ids of an answer, with its end-of-turn token. Raises EngineError as `_split` does."""
        return (*await self._split(text), self.info.eos_token_ids[0])

    async def _split(self, text: str) -> tuple[int, ...]:
        """Return token ids of a text, with other token boundaries than the tokenizer would choose (`split_randomly`).

        Raises EngineError if the ids do not decode to the text.
        """
        ids: list[int] = []
        for piece in split_randomly(text, every=self._cut_every):
            if piece not in self._piece_ids:
                self._piece_ids[piece] = await self.client.encode(piece)
            ids += self._piece_ids[piece]
        if (decoded := await self.decode(ids)) != text:
            raise EngineError(f"The tokenizer does not allow this split: {text!r} decodes as {decoded!r}.")
        return tuple(ids)

    async def _verify_plugin(self) -> None:
        """Make the server sample tokens that no model would choose. Raises EngineError if it samples others."""
        ids = await self._split("~}~")
        body = {"prompt": "a", "max_tokens": len(ids), "return_token_ids": True}
        answer = await self._forcing_client.forcing(ids).json("POST", COMPLETIONS, body)
        if tuple(answer["choices"][0]["token_ids"]) != ids:
            raise EngineError(
                f"{self.client.name} cannot be made to sample given tokens, because Polar's logits processor is not "
                f"loaded: start it with PYTHONPATH={PLUGIN} and --logits-processors {LOGITS_PROCESSOR}."
            )


def prescribed_engine(settings: EngineSettings, template: str = "keeps") -> Engine:
    """Return an engine that gives prescribed answers. Raises UsageError if the configured engine cannot do this."""
    if settings.kind == "scripted":
        return ScriptedEngine()
    if settings.kind != "vllm" or not settings.url:
        raise UsageError(
            "Prescribed answers need --engine vllm with --engine-url (scripts/fidelity.sh starts such a server), or "
            "--engine scripted."
        )
    path = TEMPLATES[template]
    return ForcedVllmEngine(settings.url, model=settings.model, template=None if path is None else path.read_text())


def make_model(folder: Path) -> Path:
    """Write a model for tests into `folder` (4 MB; takes ten seconds). Only its tokenizer and its template matter.

    The model is small enough that a CPU reads prompts of 50,000 tokens in seconds. Its weights are random. Its chat
    template is that of the bundled polar-tiny. Its byte-level tokenizer splits text like common tokenizers (that of
    polar-tiny needs twice as many tokens). The tokenizer is trained on Python's standard library, so the same version
    of Python gives the same tokenizer. Needs `pip install 'polar-proxy[local]'`.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORD), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    template = json.loads((POLAR_TINY / "tokenizer_config.json").read_text())["chat_template"]
    return save_random_qwen3(folder, tokenizer, _texts(), template, vocab_size=_VOCABULARY, context_length=_CONTEXT)


def save_random_qwen3(
    folder: Path,
    tokenizer: Any,
    texts: Iterable[str],
    template: str,
    *,
    vocab_size: int,
    context_length: int,
    intermediate_size: int = 64,
    layers: int = 1,
    heads: int = 2,
) -> Path:
    """Train a byte-level `tokenizer` on `texts` and write it into `folder` with a random Qwen3. Return the folder.

    The weights are sharp enough that tokens have different probabilities. `heads`: number of query heads; there are
    half as many key heads.
    """
    from tokenizers import decoders, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPECIAL + _TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens(list(_TAGS))
    fast.chat_template = template
    return save_random_model(
        folder,
        fast,
        ("<|im_end|>",),
        context_length=context_length,
        intermediate_size=intermediate_size,
        layers=layers,
        heads=heads,
    )


def save_random_model(
    folder: Path,
    tokenizer: Any,
    stops: Sequence[str],
    *,
    context_length: int,
    intermediate_size: int = 64,
    layers: int = 1,
    heads: int = 2,
) -> Path:
    """Write a tokenizer of Transformers with its chat template, and a random Qwen3. Return the folder.

    `stops`: the tokens at which the model stops. The first one is its end-of-turn token.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    stop_ids = tokenizer.convert_tokens_to_ids(list(stops))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,  # the smallest size that vLLM's CPU attention supports
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
        initializer_range=0.3,
        eos_token_id=stop_ids[0],
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    if len(stop_ids) > 1:
        model.generation_config.eos_token_id = stop_ids
    model.save_pretrained(folder)
    return folder


def _texts() -> Iterator[str]:
    """Yield text that every Python installation has: the source code of its standard library, ordered by file name."""
    left = _READ_BYTES
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(errors="replace")
        if left <= 0:
            return
        left -= len(text)
        yield text
