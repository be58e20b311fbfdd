"""New weights into an engine: the probe that checks them, and the order of vLLM's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import orjson
import pytest
import torch
from safetensors.torch import load_file

from polar_proxy.engines.vllm import WEIGHT_VERSION_SECONDS, VllmEngine
from polar_proxy.errors import EngineError, TrainingError
from polar_proxy.training.config import GrpoConfig, LoraSettings
from polar_proxy.training.policy.lora import MergedWeights
from polar_proxy.training.weight_sync import (
    LocalSync,
    VllmAdapterSync,
    VllmControl,
    VllmDiskSync,
    make_vllm_sync,
    probe,
    probe_ids,
)

pytestmark = pytest.mark.slow

IDS = [1, 2, 3]


class ScoringEngine:
    """An engine that returns these log-probabilities."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        assert list(token_ids) == IDS
        return self.values


async def check(engine: Any, now: list[float], before: list[float] | None = None) -> Any:
    return await probe(engine, IDS, now, before, 0.02)


async def test_probe_of_an_engine_with_the_trainers_weights() -> None:
    result = await check(ScoringEngine(-1.0, -2.01), [-1.0, -2.0], [-1.5, -2.5])
    assert result.largest == pytest.approx(0.01)
    assert (result.mean, result.moved) == (pytest.approx(0.005), pytest.approx(0.5))


@pytest.mark.parametrize("scores", [(-1.0, -2.03), (-1.0, float("nan"))])
async def test_probe_rejects_an_engine_that_differs(scores: tuple[float, float]) -> None:
    with pytest.raises(TrainingError, match="differ by up to"):
        await check(ScoringEngine(*scores), [-1.0, -2.0])


async def test_probe_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    class HangingEngine:
        async def score(self, token_ids: Sequence[int]) -> list[float]:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    monkeypatch.setattr("polar_proxy.training.weight_sync.REQUEST_SECONDS", 0.05)
    with pytest.raises(TrainingError, match=r"did not score the probe within 0\.05 s"):
        await check(HangingEngine(), [-1.0, -2.0])


async def test_probe_detects_old_weights_after_a_small_step() -> None:
    """The step moved the policy by a tenth of the tolerance; the engine's scores did not change."""
    with pytest.raises(TrainingError, match="did not load them"):
        await check(ScoringEngine(-1.0, -2.0), [-1.002, -2.002], [-1.0, -2.0])


async def test_probe_accepts_a_step_smaller_than_the_noise() -> None:
    assert (await check(ScoringEngine(-1.001, -2.001), [-1.00001, -2.0], [-1.0, -2.0])).moved < 1e-5


@pytest.mark.parametrize(
    ("moved", "offset", "noise", "fails"),
    [
        (0.010, 0.0020, 1e-6, True),  # a fifth of the move is missing
        (0.010, 0.0020, 1e-3, False),  # twice the usual difference of an engine in bfloat16
        (0.010, 0.0005, 1e-6, False),  # a twentieth: the noise increased
        (0.010, 0.0020, None, False),  # the first sync
    ],
)
async def test_probe_detects_partly_loaded_weights_within_the_tolerance(
    moved: float, offset: float, noise: float | None, fails: bool
) -> None:
    probing = probe(
        ScoringEngine(-1.0 - offset, -2.0 - offset), IDS, [-1.0, -2.0], [-1.0 + moved, -2.0 + moved], 0.02, noise
    )  # type: ignore[arg-type]
    if fails:
        with pytest.raises(TrainingError, match="only a part of them"):
            await probing
    else:
        assert (await probing).mean == pytest.approx(offset)


async def test_tied_head_is_written_under_both_names(tmp_path: Path) -> None:
    server = FakeVllm()
    sync = VllmDiskSync(control(server), tmp_path)
    await sync.push({"model.embed_tokens.weight": torch.arange(6.0).reshape(3, 2)}, "1")
    assert torch.equal(server.loaded["lm_head.weight"], server.loaded["model.embed_tokens.weight"])
    head = torch.zeros(3, 2)
    await sync.push({"model.embed_tokens.weight": torch.ones(3, 2), "lm_head.weight": head}, "2")
    assert torch.equal(server.loaded["lm_head.weight"], head)


def test_probe_is_the_same_for_every_run() -> None:
    assert probe_ids(300) == probe_ids(300)
    assert len(set(probe_ids(300))) > 30
    assert max(probe_ids(7)) < 7


async def test_engine_that_rejects_weights_stops_the_run() -> None:
    class RejectingEngine:
        async def load_weights(self, source: object, version: str) -> None:
            raise EngineError("These weights are not this model's")

    with pytest.raises(TrainingError, match="version 7: These weights"):
        await LocalSync(RejectingEngine()).push({}, "7")


class FakeVllm:
    """Records the routes that are called, and the weights on disk at the time of the reload."""

    def __init__(self, failing: str | None = None) -> None:
        self.requested: list[str] = []
        self.version = ""
        self.loaded: dict[str, torch.Tensor] = {}
        self.failing = failing

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        self.requested.append(path)
        if self.failing is not None and path.startswith(self.failing):
            return httpx.Response(404, text="Not Found")
        if path == "/collective_rpc":
            body = orjson.loads(request.content)
            assert body["method"] == "reload_weights"
            self.loaded = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        if path == "/update_weight_version":
            self.version = orjson.loads(request.content)["new_version"]
        return httpx.Response(200, json={})


def control(server: Any) -> VllmControl:
    """Return control of a server that only this process samples from: no cached weight version has to expire."""
    return VllmControl("http://engine/", engine=VllmEngine("http://engine"), transport=httpx.MockTransport(server))


async def test_vllm_reloads_from_disk_while_paused(tmp_path: Path) -> None:
    server = FakeVllm()
    weights = {"w": torch.arange(3.0)}
    await VllmDiskSync(control(server), tmp_path).push(weights, "4")
    assert server.requested == ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume"]
    assert server.version == "4"
    assert server.loaded["w"].tolist() == [0.0, 1.0, 2.0]
    assert list(tmp_path.iterdir()) == []


async def test_pause_lasts_until_other_processes_drop_the_cached_version(tmp_path: Path) -> None:
    """An engine of this process drops it at once, and there is nothing to wait for."""
    times: dict[str, float] = {}
    engine = VllmEngine("http://engine")

    def server(request: httpx.Request) -> httpx.Response:
        times[request.url.path] = time.monotonic()
        return httpx.Response(200, json={})

    async def pause_seconds(**more: Any) -> float:
        await VllmDiskSync(VllmControl("http://engine", transport=httpx.MockTransport(server), **more), tmp_path).push(
            {}, "4"
        )
        return times["/resume"] - times["/update_weight_version"]

    assert await pause_seconds() >= WEIGHT_VERSION_SECONDS
    with patch.object(engine, "weights_changed") as weights_changed:
        await pause_seconds(engine=engine)
    weights_changed.assert_called_once_with()


async def test_vllm_without_weight_versions_stops_the_run(tmp_path: Path) -> None:
    """Its tokens would carry no policy version, or an old one."""
    server = FakeVllm(failing="/update_weight_version")
    with pytest.raises(TrainingError, match=r"404 to POST /update_weight_version.*use vLLM 0\.32"):
        await VllmDiskSync(control(server), tmp_path).push({}, "4")
    assert server.requested[-1] == "/resume"


async def test_vllm_that_cannot_reload_is_resumed_with_an_error(tmp_path: Path) -> None:
    server = FakeVllm(failing="/collective_rpc")
    with pytest.raises(TrainingError, match=r"404 to POST /collective_rpc.*VLLM_SERVER_DEV_MODE"):
        await VllmDiskSync(control(server), tmp_path).push({}, "4")
    assert server.requested[-1] == "/resume"


async def test_vllm_reloads_an_adapter_while_paused(tmp_path: Path) -> None:
    requests: list[tuple[str, bytes]] = []

    def server(request: httpx.Request) -> httpx.Response:
        requests.append((request.url.raw_path.decode(), request.content))
        if request.url.path == "/v1/load_lora_adapter":
            assert (Path(orjson.loads(request.content)["lora_path"]) / "adapter_model.safetensors").exists()
        return httpx.Response(200, json={})

    config = GrpoConfig(lora=LoraSettings(rank=2, adapter_name="polar"))
    sync = make_vllm_sync(config, control(server), tmp_path)
    assert isinstance(sync, VllmAdapterSync)
    name = "model.layers.0.self_attn.q_proj"
    adapter = {f"{name}.lora_A.default.weight": torch.ones(2, 8), f"{name}.lora_B.default.weight": torch.ones(8, 2)}
    await sync.push(MergedWeights({}, adapter, LoraSettings(rank=2)), "4")
    routes = ["/pause?mode=keep", "/v1/load_lora_adapter", "/update_weight_version", "/resume"]
    assert [path for path, _ in requests] == routes
    body = orjson.loads(requests[1][1])
    assert body == {"lora_name": "polar", "lora_path": str(tmp_path / "polar"), "load_inplace": True}
    written = load_file(tmp_path / "polar" / "adapter_model.safetensors")
    assert set(written) == {f"base_model.model.{name}.lora_{side}.weight" for side in "AB"}
    with pytest.raises(TrainingError, match="no adapter"):
        await sync.push({}, "5")


def test_merged_weights_are_reloaded_without_an_adapter_name(tmp_path: Path) -> None:
    for lora in (None, LoraSettings(rank=2)):
        assert type(make_vllm_sync(GrpoConfig(lora=lora), VllmControl("http://engine"), tmp_path)) is VllmDiskSync
