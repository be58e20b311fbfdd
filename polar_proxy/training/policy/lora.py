"""LoRA by PEFT: small trained matrices added to frozen weights. `lora = {rank = 16}` in `[grpo]` enables it.

Promises (tests/training/test_lora.py):

* At the start the policy equals the base model bit for bit, because the matrix B (see below) is 0.
* A step changes only the adapter.
* The merged weights, which checkpoints and engines get, give the log-probabilities of base and adapter together.

A merged weight is W' = W + (alpha / rank) B A. Source: Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polar_proxy.errors import TrainingError, UsageError
from polar_proxy.training.config import LoraSettings

PEFT_NAME = "default"
"""The name that PEFT gives to an adapter."""


class MergedWeights(dict[str, Tensor]):
    """Weights with the adapter merged in, under the base model's names.

    `adapter` has the adapter's own tensors, for engines that load adapters.
    """

    def __init__(self, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], settings: LoraSettings) -> None:
        super().__init__(weights)
        self.adapter, self.settings = adapter, settings


def wrap(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Freeze the model's weights and add an adapter that changes nothing yet.

    Raises UsageError if PEFT is missing or finds no module to adapt.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError("LoRA needs PEFT: pip install 'polar-proxy[lora]'") from error
    peft_config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scale * settings.rank,
        target_modules=settings.targets if isinstance(settings.targets, str) else list(settings.targets),
        lora_dropout=0.0,  # the engine samples without dropout
        bias="none",
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            wrapped = inject_adapter_in_model(peft_config, model, adapter_name=PEFT_NAME)
        except ValueError as error:
            raise UsageError(f"lora.targets names no module of this model: {error}") from error
    for name, parameter in wrapped.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return wrapped.eval()


def adapter(model: Any) -> dict[str, Tensor]:
    """Return the adapter's tensors by name, without copying."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if ".lora_" in name}


def load_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load an adapter. Raises TrainingError if its rank or its targets are not those of the model's adapter."""
    own = adapter(model)
    if own.keys() != tensors.keys() or any(own[name].shape != tensor.shape for name, tensor in tensors.items()):
        raise TrainingError("the checkpoint holds another adapter: its rank or its targets differ")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def merge(model: Any, settings: LoraSettings) -> MergedWeights:
    """Return the weights of an equivalent model without an adapter. Adapted matrices are copies, the others are not."""
    weights: dict[str, Tensor] = {}
    with torch.no_grad():
        layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                continue
            layer = name.rsplit(".base_layer.", 1)[0]
            value = parameter.detach()
            if layer != name and name.endswith(".weight"):
                value = value + layers[layer].get_delta_weight(PEFT_NAME).to(value.dtype)
            weights[name.replace(".base_layer.", ".")] = value
    return MergedWeights(weights, adapter(model), settings)


def save_adapter(tensors: Mapping[str, Tensor], settings: LoraSettings, folder: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`, as PEFT and vLLM read them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {
        f"base_model.model.{name.replace(f'.{PEFT_NAME}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors})
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.rank,
        "lora_alpha": settings.scale * settings.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config, indent=2))
