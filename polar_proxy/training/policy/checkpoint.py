"""Checkpoints: folders that are complete or absent. Each one is also a model that an engine can serve.

    RUN/checkpoints/step-000012/   model.safetensors + the model's own small files, optimiser.pt, state.json

A checkpoint is written under another name, synced to disk and then renamed, so that the last checkpoint is complete
even after a kill. This module imports torch only where it reads or writes weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from polar_proxy.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """State of a run besides weights and optimiser."""

    step: int
    """Number of completed steps."""
    updates: int
    """Number of steps that changed the weights."""
    version: str
    """Policy version of the run's weights."""
    trained: tuple[str, ...]
    """Groups that are done, because they were trained on or had no signal, but may not be acknowledged yet. If such a
    group is offered again, it is only acknowledged."""
    rounds: int = 0
    """Number of rounds of rollouts that were started."""
    minutes: float = 0.0
    """Time spent training, over all restarts."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    state: TrainerState
    weights: dict[str, Tensor]
    optimiser: dict[str, Any]


def save(
    run: Path,
    state: TrainerState,
    weights: Mapping[str, Tensor],
    optimiser: Mapping[str, Any],
    *,
    model: Path,
    keep: int,
) -> Path:
    """Write a checkpoint, with copies of the small files of the folder `model`. Then remove all but the newest `keep`
    checkpoints."""
    import torch
    from safetensors.torch import save_file

    parent = run / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    final, draft = parent / f"step-{state.step:06d}", parent / f".draft-{state.step:06d}"
    for old in parent.glob(".draft-*"):  # left by a killed process
        shutil.rmtree(old)
    draft.mkdir()
    for pattern in MODEL_FILES:
        for file in sorted(model.glob(pattern)):
            if file.name not in ("state.json", "model.safetensors.index.json"):
                shutil.copyfile(file, draft / file.name)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    torch.save(dict(optimiser), draft / "optimiser.pt")
    (draft / "state.json").write_bytes(orjson.dumps(asdict(state)))
    for file in draft.iterdir():
        _fsync(file)
    _fsync(draft)
    if final.exists():
        shutil.rmtree(final)
    os.rename(draft, final)
    _fsync(parent)
    for old in _folders(run)[:-keep]:
        shutil.rmtree(old)
    return final


def latest(run: Path) -> Path | None:
    """Return the folder of the newest checkpoint of a run."""
    folders = _folders(run)
    return folders[-1] if folders else None


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises TrainingError for a newer format."""
    import torch
    from safetensors.torch import load_file

    raw = orjson.loads((folder / "state.json").read_bytes())
    if raw["format"] > FORMAT:
        raise TrainingError(
            f"{folder} was written by a newer Polar (checkpoint format {raw['format']}; this one reads {FORMAT})"
        )
    known = {field.name: raw[field.name] for field in fields(TrainerState)}
    state = TrainerState(**{**known, "trained": tuple(raw["trained"])})
    return Checkpoint(
        folder,
        state,
        load_file(folder / "model.safetensors"),
        torch.load(folder / "optimiser.pt", weights_only=True),
    )


def weights_after(run: Path, step: int, model: Any, *, initial: Path, adapter: bool) -> dict[str, Tensor]:
    """Return the parameters of `model` after a step, by name. With `adapter`, return only the adapter's parameters (for
    step 0, only the matrices B, which are 0).

    `initial`: folder of the weights before the first step. Raises TrainingError if the checkpoint of the step does not
    exist, or if the checkpoint or `initial` holds the weights of another model.
    """
    from safetensors.torch import load_file

    folder = run / "checkpoints" / f"step-{step:06d}"
    if step and not folder.is_dir():
        raise TrainingError(
            f"the batch has tokens that were sampled with the weights after step {step}, and there is no checkpoint of "
            "that step: raise keep_checkpoints, lower max_async_steps, or set `proximal` to a value other than sampler"
        )
    own = dict(model.named_parameters())
    if adapter and not step:  # a new adapter changes nothing, because its matrix B is 0
        import torch

        return {name: torch.zeros_like(tensor) for name, tensor in own.items() if ".lora_B." in name}
    if adapter:
        return dict(load(folder).optimiser["adapter"])
    files = sorted((folder if step else initial).glob("*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items() if name in own}
    if weights.keys() != own.keys():
        raise TrainingError(f"{folder if step else initial} holds the weights of another model")
    return weights


def write_file(path: Path, data: bytes) -> None:
    """Replace a small file atomically."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(data)
    _fsync(draft)
    os.replace(draft, path)
    _fsync(path.parent)


def _folders(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
