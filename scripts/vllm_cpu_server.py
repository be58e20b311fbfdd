"""vLLM's server on a CPU, for `scripts/vllm_cpu.sh serve`. Runs in vLLM's environment.

    python vllm_cpu_server.py MODEL EMPTY_FOLDER [flags of vLLM's server...]

Importing vLLM takes most of a start. vLLM spawns its engine as a second process on a CPU, which would import it again;
here this process is forked.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from vllm.entrypoints.launchers.api_server.entry import main
from vllm.v1.engine import utils


def untie(model: Path, untied: Path) -> Path:
    """Write a model whose output head is untied from the embedding into `untied`, and return that folder; `model`
    itself if its head is untied already.

    vLLM's CPU kernels keep a packed copy of the head, and a weight reload renews it only if the head is loaded under
    its own name.
    """
    config = json.loads((model / "config.json").read_text())
    places, embedding = {}, None
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), f"body-{file.name}")
            if "model.embed_tokens.weight" in tensors.keys():  # noqa: SIM118
                embedding = tensors.get_tensor("model.embed_tokens.weight")
    if not config.get("tie_word_embeddings") or embedding is None:
        return model
    for file in model.iterdir():
        (untied / f"{'body-' if file.suffix == '.safetensors' else ''}{file.name}").symlink_to(file)
    save_file({"lm_head.weight": embedding}, untied / "head.safetensors", {"format": "pt"})
    places["lm_head.weight"] = "head.safetensors"
    for name, written in (
        ("config.json", {**config, "tie_word_embeddings": False}),
        ("model.safetensors.index.json", {"metadata": {}, "weight_map": places}),
    ):
        (untied / name).unlink(missing_ok=True)
        (untied / name).write_text(json.dumps(written))
    return untied


if __name__ == "__main__":
    model, untied, *flags = sys.argv[1:]
    served = untie(Path(model).absolute(), Path(untied))
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv[1:] = ["--model", str(served), *flags]
    main()
