"""The model, its key-value cache, and its two passes: over a chunk of one sequence, and over one token of each running
sequence.

Works for decoder-only models of Transformers in which every layer attends to the whole past through a `Cache`. Loading
compares the cached passes with the model's own forward pass, and refuses the model if they differ.

Cache invariant: the first `length` positions of a row hold the keys and values of exactly the tokens stored with it,
made by the weights now loaded. Everything after them is finite (never NaN), so a mask is enough to hide it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.utils import logging

from polar_proxy.errors import EngineError
from polar_proxy.types import TokenIds

MIN_REUSE = 16
"""A shorter common prefix is not worth looking up or keeping."""
MASK_CELLS = 1 << 23
"""Largest attention mask of a chunk, in cells: it keeps the memory of a long prompt linear in its length."""
_SCORED_CHUNK = 512


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of one token's keys and values: `layers` x 2 x `heads` x `head_dim` numbers of `dtype` on `device`."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self, rows: int, capacity: int) -> torch.Tensor:
        """Return a KV buffer [layers, 2, rows, heads, capacity, head_dim].

        It is zeroed because a masked NaN would still poison softmax times V. On a CPU its pages are only committed when
        they are touched.
        """
        size = (self.layers, 2, rows, self.heads, capacity, self.head_dim)
        return torch.zeros(size, dtype=self.dtype, device=self.device)


class PositionedCache(Cache):  # type: ignore[misc]  # transformers has no stubs
    """A Transformers cache over a KV buffer that writes each row's new keys at that row's own position.

    `data` [layers, 2, rows, heads, capacity, head_dim]; `start` is one int for a single row that gets a chunk, or an
    int64 tensor [rows] of positions when each row gets one token. `length` is how far attention may look.
    """

    def __init__(self, data: torch.Tensor, start: int | torch.Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._data = data
        self._start = start
        self._length = length
        if isinstance(start, torch.Tensor):
            self._rows = torch.arange(data.shape[2], device=data.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states and value_states [rows, heads, new, head_dim] -> both [rows, heads, length, head_dim]."""
        keys, values = self._data[layer_idx]
        if isinstance(self._start, int):
            new = key_states.shape[2]
            keys[:, :, self._start : self._start + new] = key_states
            values[:, :, self._start : self._start + new] = value_states
        else:
            keys[self._rows, :, self._start] = key_states[:, :, 0]
            values[self._rows, :, self._start] = value_states[:, :, 0]
        return keys[:, :, : self._length], values[:, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._start) if isinstance(self._start, int) else self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length, 0


class BatchKV:
    """Keys and values of the running batch, one row ("slot") per sequence, in one buffer that grows by doubling."""

    def __init__(self, shape: KVShape, rows: int, limit: int, capacity: int = 1024) -> None:
        self._shape = shape
        self._rows = rows
        self._limit = limit
        self._initial = min(capacity, limit)
        self.data = shape.zeros(rows, self._initial)

    def row(self, slot: int) -> torch.Tensor:
        """Return a view of one slot: [layers, 2, 1, heads, capacity, head_dim]."""
        return self.data[:, :, slot : slot + 1]

    def put(self, slot: int, source: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of `source` [layers, 2, 1, heads, >= length, head_dim] into a slot."""
        self.row(slot)[..., :length, :] = source[..., :length, :]

    def reserve(self, need: int, lengths: Sequence[int]) -> None:
        """Make room for `need` positions in every slot; `lengths` are those of the slots in use."""
        capacity = self.data.shape[-2]
        if need <= capacity:
            return
        while capacity < need:
            capacity *= 2
        old, self.data = self.data, self._shape.zeros(self._rows, max(min(capacity, self._limit), need))
        for slot, length in enumerate(lengths):
            self.put(slot, old[:, :, slot : slot + 1], length)

    def shrink(self) -> None:
        """Release the memory of long sequences. Only while no slot is in use."""
        if self.data.shape[-2] > 8 * self._initial:
            self.data = self._shape.zeros(self._rows, self._initial)


@dataclass(frozen=True, slots=True)
class _CachedPrefix:
    tokens: TokenIds
    data: torch.Tensor


class PrefixCache:
    """Keys and values of finished sequences, at most `limit_bytes`, least recently used dropped first.

    A sequence that is a prefix of a newer one is dropped, so that a session keeps one row and not one for each turn.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._rows: OrderedDict[int, _CachedPrefix] = OrderedDict()
        self._next = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()
        self.nbytes = 0

    def keep(self, tokens: TokenIds, data: torch.Tensor) -> None:
        """Copy the row `data` [layers, 2, 1, heads, >= n, head_dim] of the n `tokens`."""
        length = len(tokens)
        size = data[..., :length, :].nbytes
        if length < MIN_REUSE or size > self._limit:
            return
        for key, row in list(self._rows.items()):
            common = common_prefix(row.tokens, tokens)
            if common == length:  # a row that is at least as long covers it already
                self._rows.move_to_end(key)
                return
            if common == len(row.tokens):
                self._drop(key)
        while self._rows and self.nbytes + size > self._limit:
            self._drop(next(iter(self._rows)))
        kept = data[..., :length, :].clone(memory_format=torch.contiguous_format)
        self._rows[self._next] = _CachedPrefix(tokens, kept)
        self._next += 1
        self.nbytes += kept.nbytes

    def find(self, tokens: TokenIds) -> tuple[int, torch.Tensor | None]:
        """Return the length of the longest cached prefix of `tokens`, and the row that holds it."""
        best, best_key = 0, None
        for key, row in self._rows.items():
            common = common_prefix(row.tokens, tokens)
            if common > best:
                best, best_key = common, key
        if best_key is None or best < MIN_REUSE:
            return 0, None
        self._rows.move_to_end(best_key)
        return best, self._rows[best_key].data

    def _drop(self, key: int) -> None:
        self.nbytes -= self._rows.pop(key).data.nbytes


def common_prefix(one: TokenIds, two: TokenIds) -> int:
    """Return the number of equal leading tokens of two int32 arrays."""
    length = min(len(one), len(two))
    differ = one[:length] != two[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class ModelRunner:
    """Weights in fp32 and the passes over them. Not thread-safe."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.context_length: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.parameter_count = sum(tensor.numel() for tensor in model.parameters())
        self.shape = KVShape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            device=model.device,
        )

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
            runner._verify()
        return runner

    def _verify(self) -> None:
        """Compare a chunked prefill and a decode step with the model's own uncached forward pass."""
        ids = [(7 * place + 1) % self.vocab_size for place in range(8)]
        expected = self.model(input_ids=self._tensor([ids]), use_cache=False).logits[0, -1].float()
        row, batch = self.shape.zeros(1, 8), BatchKV(self.shape, 2, limit=8)
        try:
            self.extend(row, ids[:4], 0)
            self.extend(row, ids[4:7], 4)
            batch.put(0, row, 7)
            found = self.step(batch, [ids[7]], [7])[0]
        except (RuntimeError, AttributeError, TypeError) as error:
            raise EngineError(f"This model does not work with the local engine: {error}", status=500) from error
        gap = float((expected - found).abs().max())
        if not gap < 1e-2 * max(1.0, float(expected.abs().max())):
            raise EngineError(
                f"The local engine's cached pass differs from this model's own by {gap:.3g}. Use vLLM.", status=500
            )

    def chunk_size(self, start: int, wanted: int) -> int:
        """Return how many of `wanted` tokens may pass at once after `start` others (see MASK_CELLS)."""
        return min(wanted, max(16, MASK_CELLS // (start + wanted)))

    def extend(
        self, row: torch.Tensor, token_ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> torch.Tensor:
        """Run a chunk of one sequence after the `start` positions that `row` (one row of KV) already holds.

        Returns fp32 logits: [vocab] of the last position, or with all_logits [chunk, vocab].
        """
        end = start + len(token_ids)
        positions = torch.arange(start, end, device=self.shape.device)
        future = torch.arange(end, device=self.shape.device) > positions[:, None]
        # Numbers, not booleans: attention would convert booleans to numbers again in every layer.
        mask = torch.zeros(future.shape, dtype=self.shape.dtype, device=self.shape.device)
        mask.masked_fill_(future, float("-inf"))
        out = self.model(
            input_ids=self._tensor([token_ids]),
            position_ids=positions[None],
            attention_mask=mask[None, None],
            past_key_values=PositionedCache(row, start, end),
            use_cache=True,
            logits_to_keep=0 if all_logits else 1,
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits if all_logits else logits[-1]

    def step(self, batch: BatchKV, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Run one token of each of the first n slots, at `positions` (which must fit). Returns fp32 [n, vocab]."""
        longest = max(positions) + 1
        at = torch.tensor(positions, device=self.shape.device)
        mask = torch.arange(longest, device=self.shape.device) <= at[:, None]
        out = self.model(
            input_ids=self._tensor(token_ids).unsqueeze(1),
            position_ids=at[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=PositionedCache(batch.data[:, :, : len(positions)], at, longest),
            use_cache=True,
        )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def score(self, token_ids: Sequence[int]) -> Iterator[list[float]]:
        """Yield raw log-probabilities of token_ids[1:], chunk by chunk, from a fresh pass with its own cache."""
        ids = list(token_ids)
        row, start = self.shape.zeros(1, max(len(ids), 1)), 0
        while start < len(ids) - 1:
            count = self.chunk_size(start, min(_SCORED_CHUNK, len(ids) - 1 - start))
            with torch.inference_mode():
                logits = self.extend(row, ids[start : start + count], start, all_logits=True)
                targets = self._tensor(ids[start + 1 : start + count + 1])
                yield torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0].tolist()
            start += count

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

    def _tensor(self, token_ids: Any) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.shape.device)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a safetensors file, or of all such files in a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise EngineError(f"There are no safetensors weights at {path}.", status=400)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return state
