"""Sends a trainer's weights to a server by `VllmNcclSync`; `test_nccl.py` runs it with vLLM's Python.

Prints one line of JSON per sync, or the error that stopped it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import asdict

import torch

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.vllm import VllmEngine
from polar_proxy.errors import TrainingError
from polar_proxy.training.config import GrpoConfig
from polar_proxy.training.policy.model import Learner, load_model
from polar_proxy.training.weight_sync import VllmControl, VllmNcclSync, probe, probe_ids
from tests.fakes import nccl_on_cpu


async def main(url: str, how: str) -> None:
    learner = Learner(load_model(POLAR_TINY), GrpoConfig())
    ids = probe_ids(learner.vocab_size)
    before: list[float] | None = None
    async with VllmEngine(url, model="polar-tiny") as engine:
        sync = VllmNcclSync(VllmControl(url, engine=engine), device="cpu")
        for version in ("0", "1", "2"):
            weights = learner.weights()
            if how == "wrong_shape" and version == "1":
                weights = {name: torch.cat([tensor, tensor]) for name, tensor in weights.items()}
            started = time.perf_counter()
            await sync.push(weights, version)
            seconds = time.perf_counter() - started
            logprobs = learner.logprobs(ids)
            result = await probe(engine, ids, logprobs, before, 0.02)
            engine_version = await engine.weight_version()
            print(json.dumps({"engine": engine_version, "seconds": seconds, **asdict(result)}), flush=True)
            before = logprobs
            noise = torch.Generator().manual_seed(int(version))
            for tensor in learner.weights().values():
                tensor.add_(1e-4 * torch.randn(tensor.shape, generator=noise))


def run(url: str, how: str) -> None:
    nccl_on_cpu.install()
    try:
        asyncio.run(main(url, how))
    except TrainingError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    os._exit(0)  # on a busy machine, threads of the other transport abort the interpreter's own exit
