"""A vLLM plugin that makes the server sample given tokens: `vllm_xargs: {"forced_ids": [...]}` in a request's body.

The server runs in its own Python environment, so this file imports nothing of Polar. Start the server with this folder
on PYTHONPATH and `--logits-processors polar_forced_tokens:ForcedTokens`.

The n-th token of an answer is `forced_ids[n]`, whatever the model prefers; after the last forced token the model is
free. vLLM computes raw log-probabilities before logits processors, so it reports the model's own log-probability of
each forced token, exactly as if it had been sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

NAME = "forced_ids"


class ForcedTokens(AdapterLogitsProcessor):  # type: ignore[misc]
    """A logits processor that allows only `forced_ids[n]` as the n-th token of an answer."""

    @classmethod
    def validate_params(cls, params: Any) -> None:
        """Raise ValueError (HTTP 400) unless `forced_ids` is a list of token ids."""
        ids = (params.extra_args or {}).get(NAME)
        if ids is not None and not (isinstance(ids, list) and all(isinstance(token, int) for token in ids)):
            raise ValueError(f"{NAME} must be a list of token ids.")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        ids: list[int] | None = (params.extra_args or {}).get(NAME)
        if not ids:
            return None

        def force(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            if (position := len(output_ids)) < len(ids):
                kept = logits[ids[position]].clone()
                logits.fill_(float("-inf"))
                logits[ids[position]] = torch.where(torch.isfinite(kept), kept, torch.zeros_like(kept))
            return logits

        return force
