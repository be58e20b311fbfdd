"""Small random models with a family's template, control tokens and stop tokens, for a real vLLM to serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from benchmarks._families.template_engine import TemplateEngine
from polar_proxy.conformance.forced_vllm import save_random_model

Architecture = Literal["qwen3", "gpt_oss", "cohere2"]
CONTEXT = 16_384
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"vocab_size": 201_088, "head_dim": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
    "cohere2": {"logit_scale": 1.0, "bos_token_id": None},
}
"""Architecture, as Transformers names it -> fields of its configuration that other architectures lack or set
otherwise."""


def save_model(folder: Path, renderer: TemplateEngine, architecture: Architecture, context: int = CONTEXT) -> None:
    """Write a model of this architecture, and its tokenizer, into `folder`."""
    family = renderer.family
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=renderer.tokenizer,
        eos_token=family.stops[0],
        pad_token="<|endoftext|>",
        bos_token=family.bos or None,
        **({"token_suffix": family.token_suffix} if family.token_suffix else {}),
    )
    tokenizer.chat_template = family.template
    if architecture == "qwen3":
        save_random_model(folder, tokenizer, family.stops, context_length=context)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    stop_ids = list(renderer.stop_ids)
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "initializer_range": 0.3,
        "eos_token_id": stop_ids[0],
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(architecture, **{**fields, **_FIELDS[architecture]})
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = stop_ids
    model.save_pretrained(folder)
