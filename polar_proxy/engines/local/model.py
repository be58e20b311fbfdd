"""The model, the keys and values of its sequences, and its two forward passes: over a chunk of one sequence (prefill),
and over one token of each running sequence (decode).

Works for decoder-only models of Transformers in which every layer attends to the whole past through a `Cache`. Loading
compares the cached passes with the model's own forward pass, and refuses the model if they differ.

Invariant: the first `length` positions of a KV buffer hold the keys and values of exactly the tokens stored with the
buffer, computed with the weights now loaded. Each sequence has its own buffer [layers, 2, heads, capacity, head_dim],
so that a long sequence costs the others of its batch nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cachetools import LRUCache
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import logging

from polar_proxy.errors import EngineError
from polar_proxy.sequences import common_prefix_length
from polar_proxy.types import TokenIds

MIN_REUSE = 16
"""Length in tokens: shorter sequences are not kept, and shorter common prefixes are not reused."""
_SCORED_CHUNK = 256
_ATTENTION = "polar_by_sequence"


def attend_by_sequence(
    module: torch.nn.Module,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of each sequence to its own past only. Transformers calls this as its attention function.

    query [rows, query heads, new, head_dim]; keys and values: per row [heads, length, head_dim], from `SequenceCache`.
    Returns [rows, new, query heads, head_dim].
    """
    rows = [
        scaled_dot_product_attention(
            one[None], key[None], value[None], attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        for one, key, value in zip(query, keys, values, strict=True)
    ]
    return torch.cat(rows).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, attend_by_sequence)


class SequenceCache(Cache):  # type: ignore[misc]  # transformers has no stubs
    """A Transformers cache over the KV buffers of several sequences. In buffer i, new keys and values are stored at
    position `starts[i]` and after it."""

    def __init__(self, buffers: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        super().__init__(layers=[])
        self._buffers = buffers
        self._starts = starts

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Store the new keys and values of one layer, [rows, heads, new, head_dim] each, in the buffers.

        Returns all keys and all values of each row so far, [heads, start + new, head_dim] each.
        """
        keys, values = [], []
        both = torch.stack((key_states, value_states), dim=1)
        for buffer, start, new in zip(self._buffers, self._starts, both, strict=True):
            seen = buffer[layer_idx, :, :, : start + new.shape[2]]
            seen[:, :, start:] = new
            keys.append(seen[0])
            values.append(seen[1])
        return keys, values


class PrefixCache:
    """Keys and values of finished sequences, at most `limit_bytes`. The least recently used sequence is dropped first.

    A sequence that is a prefix of a newer one is dropped, so that a session keeps one entry and not one for each turn.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._entries: LRUCache[bytes, torch.Tensor] = LRUCache(limit_bytes, lambda kv: kv.nbytes)
        """KV buffers by the bytes of their token ids (int32)."""

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()

    def keep(self, tokens: TokenIds, kv: torch.Tensor) -> None:
        """Keep a copy of a KV buffer's first positions, which belong to `tokens`.

        Nothing is kept if there are fewer than MIN_REUSE tokens, if they are a prefix of a kept sequence, or if the
        copy is larger than `limit_bytes`.
        """
        length = len(tokens)
        part = kv[..., :length, :]
        if length < MIN_REUSE or part.nbytes > self._entries.maxsize or self.find(tokens)[0] == length:
            return
        name = tokens.tobytes()
        for covered in [other for other in self._entries if name.startswith(other)]:
            del self._entries[covered]
        self._entries[name] = part.clone(memory_format=torch.contiguous_format)

    def find(self, tokens: TokenIds) -> tuple[int, torch.Tensor | None]:
        """Return the length of the longest prefix of `tokens` that is cached, and the KV buffer that begins with it.

        Returns (0, None) if no such prefix has at least MIN_REUSE tokens.
        """
        lengths = {name: common_prefix_length(np.frombuffer(name, dtype=np.int32), tokens) for name in self._entries}
        best = max(lengths, key=lengths.__getitem__, default=b"")
        if lengths.get(best, 0) < MIN_REUSE:
            return 0, None
        return lengths[best], self._entries[best]


class ModelRunner:
    """A model in fp32 on the CPU, and its forward passes. Not thread-safe."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.context_length: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.parameter_count = sum(tensor.numel() for tensor in model.parameters())
        self._layers = config.num_hidden_layers
        self._heads = getattr(config, "num_key_value_heads", None) or heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads

    @classmethod
    def load(cls, path: Path) -> ModelRunner:
        """Load a model folder and verify it. Raises EngineError if this engine cannot serve it."""
        try:
            logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(f"Cannot load a model from {path}: {error}", status=500) from error
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise EngineError(
                f"The local engine serves models with full attention only; this one has {sorted(kinds)}. Use vLLM.",
                status=500,
            )
        runner = cls(model.eval().requires_grad_(False))
        with torch.inference_mode():
            runner._adopt_attention()
        return runner

    def _adopt_attention(self) -> None:
        """Replace the model's attention by `attend_by_sequence`.

        Then check it: a prefill in two chunks followed by a decode step must give the result of the model's own forward
        pass. Raises EngineError if it does not.
        """
        ids = [(7 * place + 1) % self.vocab_size for place in range(8)]
        expected = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        kv = self.new_kv(8)
        try:
            self.model.set_attn_implementation(_ATTENTION)
            self.extend(kv, ids[:4], 0)
            self.extend(kv, ids[4:7], 4)
            found = self.step([kv], [ids[7]], [7])[0]
        except (RuntimeError, AttributeError, TypeError) as error:
            raise EngineError(f"This model does not work with the local engine: {error}", status=500) from error
        gap = float((expected - found).abs().max())
        if not gap < 1e-2 * max(1.0, float(expected.abs().max())):
            raise EngineError(
                f"The local engine's logits differ by {gap:.3g} from those of the model's own forward pass. Use vLLM.",
                status=500,
            )

    def new_kv(self, capacity: int) -> torch.Tensor:
        """Return an uninitialised KV buffer [layers, 2, heads, capacity, head_dim]."""
        return torch.empty(self._layers, 2, self._heads, capacity, self._head_dim)

    def extend(
        self, kv: torch.Tensor, token_ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> torch.Tensor:
        """Run a chunk of one sequence after the `start` positions that `kv` already holds.

        Returns fp32 logits: those of the last position [1, vocab], or with `all_logits` those of all positions
        [chunk, vocab].
        """
        end = start + len(token_ids)
        positions = torch.arange(start, end)
        future = torch.arange(end) > positions[:, None]
        # Numbers, not booleans: attention would convert booleans to numbers again in every layer.
        mask = torch.zeros(future.shape).masked_fill_(future, float("-inf"))
        logits: torch.Tensor = self.model(
            input_ids=torch.tensor([token_ids]),
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=SequenceCache([kv], [start]),
            use_cache=True,
            logits_to_keep=0 if all_logits else 1,
        ).logits
        return logits[0]

    def step(self, kvs: Sequence[torch.Tensor], token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Run one token of each of n sequences, at its position in the KV buffer. Returns fp32 logits [n, vocab]."""
        logits: torch.Tensor = self.model(
            input_ids=torch.tensor(token_ids)[:, None],
            position_ids=torch.tensor(positions)[:, None],
            past_key_values=SequenceCache(kvs, positions),
            use_cache=True,
        ).logits
        return logits[:, -1]

    def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> Iterator[list[float]]:
        """Yield log-probabilities of token_ids[1:] at a temperature, one list for each chunk. Uses a new KV buffer."""
        ids = list(token_ids)
        kv = self.new_kv(len(ids))
        for start in range(0, len(ids) - 1, _SCORED_CHUNK):
            targets = ids[start + 1 : start + 1 + _SCORED_CHUNK]
            with torch.inference_mode():
                logits = self.extend(kv, ids[start : start + len(targets)], start, all_logits=True)
                logprobs = torch.log_softmax(logits / temperature, dim=-1)
                yield logprobs.gather(1, torch.tensor(targets)[:, None])[:, 0].tolist()

    def load_weights(self, source: Mapping[str, torch.Tensor] | Path) -> None:
        """Copy new weights over the old ones. All names and shapes are checked before anything changes."""
        state = read_weights(source) if isinstance(source, Path) else source
        own = dict(self.model.named_parameters(remove_duplicate=False))
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing = own.keys() - state.keys() - tied
        unknown = state.keys() - own.keys()
        wrong = [name for name in state.keys() & own.keys() if state[name].shape != own[name].shape]
        if missing or unknown or wrong:
            raise EngineError(
                f"These weights are not this model's: missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}, "
                f"of another shape {sorted(wrong)[:3]}.",
                status=400,
            )
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a safetensors file, or of all such files in a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise EngineError(f"There are no safetensors weights at {path}.", status=400)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return state
