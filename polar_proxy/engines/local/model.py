"""The model and the two passes through it: a chunk of one sequence, and one token of each row of the batch.

Works for decoder-only models of Transformers whose layers all attend to the whole past and take a Cache; `load` checks
that the cached passes give the logits of the model's own forward pass, and refuses the model if they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from polar_proxy.engines.local.kv_cache import BatchKV, KVShape, PositionedCache, SequenceKV
from polar_proxy.errors import EngineError

MASK_CELLS = 1 << 23
"""A chunk is cut so that its mask has at most so many cells: memory of a long prompt stays linear."""


class ModelRunner:
    """Weights in fp32 and the passes over them. Not thread-safe: one thread at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        self.context_length: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.parameters = sum(tensor.numel() for tensor in model.parameters())
        self.shape = KVShape(
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
            device=model.device,
        )

    @classmethod
    def load(cls, path: Path) -> ModelRunner:
        """Read a model folder. Raises EngineError if it cannot be served here."""
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
        runner.check()
        return runner

    def check(self) -> None:
        """Compare a chunked prefill and a decode step with the model's own uncached forward pass."""
        with torch.inference_mode():
            self._check()

    def _check(self) -> None:
        ids = [(7 * place + 1) % self.vocab_size for place in range(8)]
        own = self.model(input_ids=self._ids([ids]), use_cache=False).logits[0, -1].float()
        row, slots = SequenceKV(self.shape, 8), BatchKV(self.shape, 2, limit=8)
        try:
            self.extend(row, ids[:4], 0)
            self.extend(row, ids[4:7], 4)
            slots.put(0, row.data, 7)
            mine = self.step(slots, [ids[7]], [7])[0]
        except (RuntimeError, AttributeError, TypeError) as error:
            raise EngineError(f"This model does not work with the local engine: {error}", status=500) from error
        gap = float((own - mine).abs().max())
        if not gap < 1e-2 * max(1.0, float(own.abs().max())):
            raise EngineError(
                f"The local engine's cached pass differs from this model's own by {gap:.3g}. Use vLLM.", status=500
            )

    def chunk_size(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens may go through at once behind `start` others."""
        return max(16, min(wanted, MASK_CELLS // (start + wanted)))

    def extend(
        self, row: SequenceKV, token_ids: Sequence[int], start: int, *, all_logits: bool = False
    ) -> torch.Tensor:
        """Run a chunk of one sequence behind `start` positions that `row` holds already (it must have room).

        Returns fp32 logits: [vocab] of the last position, or with all_logits [chunk, vocab].
        """
        count = len(token_ids)
        end = start + count
        places = torch.arange(start, end, device=self.shape.device)
        behind = torch.arange(end, device=self.shape.device) > places[:, None]
        # As numbers, not booleans: attention would turn booleans into numbers again in every layer.
        mask = torch.zeros(behind.shape, dtype=self.shape.dtype, device=self.shape.device)
        mask.masked_fill_(behind, float("-inf"))
        out = self.model(
            input_ids=self._ids([token_ids]),
            position_ids=places[None],
            attention_mask=mask[None, None],
            past_key_values=PositionedCache(row.data, start, end),
            use_cache=True,
            logits_to_keep=0 if all_logits else 1,
        )
        logits: torch.Tensor = out.logits[0].float()
        return logits if all_logits else logits[-1]

    def step(self, slots: BatchKV, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Run one token of each of the first n slots, at `positions` (which must fit). Returns fp32 [n, vocab]."""
        longest = max(positions) + 1
        places = torch.tensor(positions, device=self.shape.device)
        mask = torch.arange(longest, device=self.shape.device) <= places[:, None]
        out = self.model(
            input_ids=self._ids(token_ids).unsqueeze(1),
            position_ids=places[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=PositionedCache(slots.data[:, :, : len(positions)], places, longest),
            use_cache=True,
        )
        logits: torch.Tensor = out.logits[:, -1].float()
        return logits

    def score(self, token_ids: Sequence[int]) -> Iterator[list[float]]:
        """Raw log-probabilities of token_ids[1:], chunk by chunk, from a fresh pass with a cache of its own."""
        ids = list(token_ids)
        row, start = SequenceKV(self.shape, max(len(ids), 1)), 0
        while start < len(ids) - 1:
            count = self.chunk_size(start, min(512, len(ids) - 1 - start))
            with torch.inference_mode():
                logits = self.extend(row, ids[start : start + count], start, all_logits=True)
                logprobs = torch.log_softmax(logits, dim=-1)
                targets = self._ids(ids[start + 1 : start + count + 1])
                yield logprobs.gather(1, targets[:, None])[:, 0].tolist()
            start += count

    def load_weights(self, source: Mapping[str, torch.Tensor] | Path) -> None:
        """Copy new weights over the old ones; all names and shapes are checked before the first byte changes."""
        state = read_weights(source) if isinstance(source, Path) else source
        own = dict(self.model.named_parameters(remove_duplicate=False))
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        missing = own.keys() - state.keys() - tied
        foreign = state.keys() - own.keys()
        wrong = [name for name in state.keys() & own.keys() if state[name].shape != own[name].shape]
        if missing or foreign or wrong:
            raise EngineError(
                f"These weights are not this model's: missing {sorted(missing)[:3]}, unknown {sorted(foreign)[:3]}, "
                f"of another shape {sorted(wrong)[:3]}.",
                status=400,
            )
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)

    def _ids(self, token_ids: Any) -> torch.Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self.shape.device)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Weights of a safetensors file, or of all such files of a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise EngineError(f"No safetensors weights at {path}.", status=400)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(load_file(file))
    return state
