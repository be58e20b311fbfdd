"""LoRA by PEFT: small matrices beside frozen weights. `[grpo] lora = {rank = 16}` is all that a run is told.

Promises (tests/training/test_lora.py):

* At the beginning the policy is the base model's, to the last bit: B is 0.
* A step changes the adapter and nothing else.
* The merged weights, which checkpoints and engines get, give the log-probabilities of base and adapter together.

W' = W + (alpha / rank) B A. Source: Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polar_proxy.errors import UsageError
from polar_proxy.training.config import LoraSettings
from polar_proxy.training.failures import TrainingError

_NAME = "default"
"""PEFT's own for an adapter."""


class MergedWeights(dict[str, Tensor]):
    """Weights by the base model's names with the adapter merged in, and the adapter alone for engines that take it."""

    def __init__(self, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], settings: LoraSettings) -> None:
        super().__init__(weights)
        self.adapter, self.settings = adapter, settings


def wrap(model: Any, settings: LoraSettings, seed: int) -> Any:
    """The same model, its weights frozen, with an adapter that changes nothing yet. Raises UsageError where PEFT is
    missing or knows no place for it."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError("LoRA needs PEFT: pip install 'polar-proxy[lora]'") from error
    chosen = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scale * settings.rank,
        target_modules=settings.targets if isinstance(settings.targets, str) else list(settings.targets),
        lora_dropout=0.0,  # the engine samples without
        bias="none",
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            made = inject_adapter_in_model(chosen, model, adapter_name=_NAME)
        except ValueError as error:
            raise UsageError(f"The adapter finds no place in this model: {error}") from error
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return made.eval()


def adapter(model: Any) -> dict[str, Tensor]:
    """Its trained tensors by name; not copies."""
    return {name: one.detach() for name, one in model.named_parameters() if ".lora_" in name}


def load_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raises TrainingError where they are another adapter's."""
    own = adapter(model)
    if own.keys() != tensors.keys() or any(own[name].shape != one.shape for name, one in tensors.items()):
        raise TrainingError("the checkpoint holds another adapter: its rank or its targets differ")
    with torch.no_grad():
        for name, one in tensors.items():
            own[name].copy_(one)


def merged(model: Any, settings: LoraSettings) -> MergedWeights:
    """What an engine without adapters computes the same with. Changed matrices are copies, the others are not."""
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        layers = {name: one for name, one in model.named_modules() if hasattr(one, "get_delta_weight")}
        for name, one in model.named_parameters():
            if ".lora_" in name:
                continue
            owner = name.rsplit(".base_layer.", 1)[0]
            value = one.detach()
            if owner != name and name.endswith(".weight"):
                value = value + layers[owner].get_delta_weight(_NAME).to(value.dtype)
            weights[name.replace(".base_layer.", ".")] = value
    return MergedWeights(weights, adapter(model), settings)


def save_adapter(tensors: Mapping[str, Tensor], settings: LoraSettings, folder: Path) -> None:
    """In PEFT's form, as PEFT and vLLM read it: `adapter_model.safetensors`, `adapter_config.json`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": one.detach().cpu().contiguous()
        for name, one in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.scale * settings.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
    }
    (folder / "adapter_config.json").write_text(json.dumps(told, indent=2))
