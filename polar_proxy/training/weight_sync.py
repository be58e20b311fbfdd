"""New weights into the engine that samples, and the proof that they arrived.

After each sync the engine scores a fixed prompt and the trainer does too. They must agree within a tolerance, and the
engine must stand nearer to the trainer's weights of now than to those of before: small updates hide within any
tolerance, and an engine that quietly kept the old weights would pass without the second condition. Nor may it differ by
more than it did at the first sync where that is much of the way that the weights went: then it took a part of them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from polar_proxy.engines.base import Engine
from polar_proxy.errors import EngineError
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.failures import TrainingError
from polar_proxy.training.lora import MergedWeights, save_adapter
from polar_proxy.training.nccl import VllmNcclSync
from polar_proxy.training.vllm_control import HEAD, VllmControl, call, with_head
from polar_proxy.types import Json

PROBE_TOKENS = 48


class WeightSync(Protocol):
    """How weights come into one kind of engine."""

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        """Returns when everything that is sampled from now on is sampled with them. Raises TrainingError."""
        ...


class AcceptsWeights(Protocol):
    """What `LocalEngine` offers."""

    async def load_weights(self, source: Any, version: str) -> None: ...


class LocalSync:
    """In memory: the engine copies the tensors between two of its steps, and answers in flight go on with the new
    weights. Their versions are recorded token by token."""

    def __init__(self, engine: AcceptsWeights) -> None:
        self._engine = engine

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        try:
            await self._engine.load_weights(weights, version)
        except EngineError as error:
            raise TrainingError(f"the engine did not take the weights of version {version}: {error}") from error


class VllmDiskSync:
    """vLLM reloads weights that the trainer wrote as safetensors, into a folder that both see: `/collective_rpc
    reload_weights` while it is paused."""

    def __init__(self, control: VllmControl, folder: Path) -> None:
        self._control = control
        self._folder = folder

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        target = self._folder / f"version-{version}"
        await asyncio.to_thread(_write, weights, target)
        told = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
        async with self._control.paused(version) as http:
            await call(http, "POST", "/collective_rpc", told)
        await asyncio.to_thread(shutil.rmtree, target)


class VllmAdapterSync:
    """vLLM loads the adapter anew under the name that it samples with; the base weights stay where they are.

    Needs a server with `--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and `--lora-modules NAME=...` with the
    adapter that `polar train adapter` writes. The folder stays: vLLM may read it again.
    """

    def __init__(self, control: VllmControl, folder: Path, name: str) -> None:
        self._control = control
        self._folder = folder
        self._name = name

    async def push(self, weights: Mapping[str, Tensor], version: str) -> None:
        if not isinstance(weights, MergedWeights):
            raise TrainingError("there is no adapter to reload: `lora` is not set")
        target = self._folder / self._name
        await asyncio.to_thread(save_adapter, weights.adapter, weights.settings, target)
        told = {"lora_name": self._name, "lora_path": str(target), "load_inplace": True}
        async with self._control.paused(version) as http:
            await call(http, "POST", "/v1/load_lora_adapter", told)


def vllm_sync(config: GrpoConfig, control: VllmControl, folder: Path) -> WeightSync:
    """As the configuration says: all weights, by disk or by NCCL, or the adapter alone."""
    if config.lora is not None and config.lora.reload is not None:
        return VllmAdapterSync(control, folder, config.lora.reload)
    if config.transfer == "nccl":
        return VllmNcclSync(control, host=config.transfer_host, device=config.device)
    return VllmDiskSync(control, folder)


def _write(weights: Mapping[str, Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in with_head(weights).items()}
    if HEAD in tensors and HEAD not in weights:
        tensors[HEAD] = tensors[HEAD].clone()  # safetensors takes no tensor under two names
    save_file(tensors, folder / "model.safetensors")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Differences in nats over the probe's tokens."""

    largest: float
    mean: float
    moved: float | None
    """Mean change of the trainer's own values since the last sync; None at the first."""

    def to_json(self) -> Json:
        return asdict(self)


def probe_ids(vocabulary: int, count: int = PROBE_TOKENS) -> list[int]:
    """Fixed tokens, the same for every run: unlikely text, whose log-probabilities are large and move easily."""
    return [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, count)]


async def probe(
    engine: Engine,
    ids: Sequence[int],
    now: Sequence[float],
    before: Sequence[float] | None,
    tolerance: float,
    noise: float | None = None,
) -> ProbeResult:
    """Compare the engine with the trainer's log-probabilities of ids[1:], `now` and `before` this sync. `noise`: the
    mean difference at the first sync, which nothing but how the two compute explains.

    Raises TrainingError where the engine is not at the trainer's weights.
    """
    try:
        found = np.array(await engine.score(ids))
    except EngineError as error:
        raise TrainingError(f"the engine cannot score the probe after the sync: {error}") from error
    gaps = np.abs(found - np.array(now))
    largest, mean = float(gaps.max()), float(gaps.mean())
    if not largest <= tolerance:  # not a number fails too
        raise TrainingError(
            f"after the sync engine and trainer differ by up to {largest:.3g} nats on the probe (allowed: "
            f"{tolerance:g}): the engine has other weights, or computes them otherwise (dtype, quantisation). "
            "Training on its samples would be wrong; raise probe_tolerance only if you know why they differ"
        )
    if before is None:
        return ProbeResult(largest, mean, None)
    moved = float(np.abs(np.array(now) - np.array(before)).mean())
    # By far nearer: a move smaller than the noise between engine and trainer proves nothing either way.
    if float(np.abs(found - np.array(before)).mean()) < mean / 4:
        raise TrainingError(
            f"after the sync the engine is nearer to the weights of before (they moved by {moved:.3g} nats on the "
            f"probe, and it is {mean:.3g} from the new ones): it did not take them"
        )
    # Both bounds are wide: noise is not the same at all weights, and a part that was left behind shows at once.
    if noise is not None and mean > 4 * noise and mean > moved / 10:
        raise TrainingError(
            f"after the sync the engine is {mean:.3g} nats from the new weights on the mean of the probe. They moved "
            f"by {moved:.3g}, and at the first sync it was {noise:.3g}: it took only a part of them. (vLLM on the "
            "processor keeps the old head where head and embedding are one: serve a copy with two, as "
            "scripts/vllm_cpu.sh does)"
        )
    return ProbeResult(largest, mean, moved)
