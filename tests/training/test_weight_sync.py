"""Weights into an engine: the probe that proves it, and vLLM's routes in their order."""

from __future__ import annotations

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
from polar_proxy.training.lora import MergedWeights
from polar_proxy.training.vllm_sync import VllmAdapterSync, VllmControl, VllmDiskSync, make_vllm_sync
from polar_proxy.training.weight_sync import LocalSync, probe, probe_ids

IDS = [1, 2, 3]


class Scores:
    """An engine that says these log-probabilities."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        assert list(token_ids) == IDS
        return self.values


async def check(engine: Any, now: list[float], before: list[float] | None = None) -> Any:
    return await probe(engine, IDS, now, before, 0.02)


async def test_an_engine_at_the_trainers_weights() -> None:
    found = await check(Scores(-1.0, -2.01), [-1.0, -2.0], [-1.5, -2.5])
    assert found.largest == pytest.approx(0.01)
    assert (found.mean, found.moved) == (pytest.approx(0.005), pytest.approx(0.5))


@pytest.mark.parametrize("said", [(-1.0, -2.03), (-1.0, float("nan"))])
async def test_an_engine_that_differs_stops_the_run(said: tuple[float, float]) -> None:
    with pytest.raises(TrainingError, match="differ by up to"):
        await check(Scores(*said), [-1.0, -2.0])


async def test_old_weights_are_found_out_however_small_the_step_was() -> None:
    """The step moved the policy by a tenth of the tolerance; the engine still says what it said before."""
    with pytest.raises(TrainingError, match="did not load them"):
        await check(Scores(-1.0, -2.0), [-1.002, -2.002], [-1.0, -2.0])


async def test_a_step_smaller_than_the_noise_proves_nothing_and_stops_nothing() -> None:
    assert (await check(Scores(-1.001, -2.001), [-1.00001, -2.0], [-1.0, -2.0])).moved < 1e-5


@pytest.mark.parametrize(
    ("moved", "off", "noise", "stops"),
    [
        (0.010, 0.0020, 1e-6, True),  # a fifth of the way is missing
        (0.010, 0.0020, 1e-3, False),  # the engine computes in bfloat16: twice what it always differs
        (0.010, 0.0005, 1e-6, False),  # a twentieth: the noise has grown
        (0.010, 0.0020, None, False),  # the first sync
    ],
)
async def test_a_part_that_was_not_taken_is_found_within_the_tolerance(
    moved: float, off: float, noise: float | None, stops: bool
) -> None:
    probing = probe(Scores(-1.0 - off, -2.0 - off), IDS, [-1.0, -2.0], [-1.0 + moved, -2.0 + moved], 0.02, noise)  # type: ignore[arg-type]
    if stops:
        with pytest.raises(TrainingError, match="only a part of them"):
            await probing
    else:
        assert (await probing).mean == pytest.approx(off)


async def test_a_head_that_is_the_embedding_is_written_under_both_names(tmp_path: Path) -> None:
    server = Vllm()
    sync = VllmDiskSync(VllmControl("http://engine", transport=httpx.MockTransport(server)), tmp_path)
    await sync.push({"model.embed_tokens.weight": torch.arange(6.0).reshape(3, 2)}, "1")
    assert torch.equal(server.read["lm_head.weight"], server.read["model.embed_tokens.weight"])
    own = torch.zeros(3, 2)
    await sync.push({"model.embed_tokens.weight": torch.ones(3, 2), "lm_head.weight": own}, "2")
    assert torch.equal(server.read["lm_head.weight"], own)


def test_the_probe_is_the_same_for_every_run() -> None:
    assert probe_ids(300) == probe_ids(300)
    assert len(set(probe_ids(300))) > 30
    assert max(probe_ids(7)) < 7


async def test_an_engine_that_refuses_weights_stops_the_run() -> None:
    class Refuses:
        async def load_weights(self, source: object, version: str) -> None:
            raise EngineError("These weights are not this model's")

    with pytest.raises(TrainingError, match="version 7: These weights"):
        await LocalSync(Refuses()).push({}, "7")


class Vllm:
    """Notes what was asked, and what weights lay on disk when it was told to read them."""

    def __init__(self, failing: str | None = None) -> None:
        self.asked: list[str] = []
        self.version = ""
        self.read: dict[str, torch.Tensor] = {}
        self.failing = failing

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        self.asked.append(path)
        if self.failing is not None and path.startswith(self.failing):
            return httpx.Response(404, text="Not Found")
        if path == "/collective_rpc":
            body = orjson.loads(request.content)
            assert body["method"] == "reload_weights"
            self.read = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        if path == "/update_weight_version":
            self.version = orjson.loads(request.content)["new_version"]
        return httpx.Response(200, json={})


async def test_vllm_reloads_from_disk_while_it_is_paused(tmp_path: Path) -> None:
    server = Vllm()
    weights = {"w": torch.arange(3.0)}
    await VllmDiskSync(VllmControl("http://engine", transport=httpx.MockTransport(server)), tmp_path).push(weights, "4")
    assert server.asked == ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume"]
    assert server.version == "4"
    assert server.read["w"].tolist() == [0.0, 1.0, 2.0]
    assert list(tmp_path.iterdir()) == []


async def test_a_pause_outlasts_what_another_process_remembers_of_the_version(tmp_path: Path) -> None:
    """With an engine at hand that is told to forget, there is nothing to wait for."""
    times: dict[str, float] = {}
    engine = VllmEngine("http://engine")

    def server(request: httpx.Request) -> httpx.Response:
        times[request.url.path] = time.monotonic()
        return httpx.Response(200, json={})

    async def held(**more: Any) -> float:
        await VllmDiskSync(VllmControl("http://engine", transport=httpx.MockTransport(server), **more), tmp_path).push(
            {}, "4"
        )
        return times["/resume"] - times["/update_weight_version"]

    assert await held() >= WEIGHT_VERSION_SECONDS
    with patch.object(engine, "weights_changed") as told:
        await held(engine=engine)
    told.assert_called_once_with()


async def test_a_vllm_that_cannot_be_told_a_version_stops_the_run(tmp_path: Path) -> None:
    """Tokens stamped with no version, or the one of before, would be taken for what they are not."""
    server = Vllm(failing="/update_weight_version")
    with pytest.raises(TrainingError, match=r"404 to POST /update_weight_version.*0\.32 can"):
        await VllmDiskSync(VllmControl("http://engine", transport=httpx.MockTransport(server)), tmp_path).push({}, "4")
    assert server.asked[-1] == "/resume"


async def test_a_vllm_that_cannot_reload_is_resumed_and_the_reason_told(tmp_path: Path) -> None:
    server = Vllm(failing="/collective_rpc")
    with pytest.raises(TrainingError, match=r"404 to POST /collective_rpc.*VLLM_SERVER_DEV_MODE"):
        await VllmDiskSync(VllmControl("http://engine/", transport=httpx.MockTransport(server)), tmp_path).push({}, "4")
    assert server.asked[-1] == "/resume"


async def test_vllm_loads_an_adapter_anew_while_it_is_paused(tmp_path: Path) -> None:
    told: list[tuple[str, bytes]] = []

    def server(request: httpx.Request) -> httpx.Response:
        told.append((request.url.raw_path.decode(), request.content))
        if request.url.path == "/v1/load_lora_adapter":
            assert (Path(orjson.loads(request.content)["lora_path"]) / "adapter_model.safetensors").exists()
        return httpx.Response(200, json={})

    control = VllmControl("http://engine", transport=httpx.MockTransport(server))
    sync = make_vllm_sync(GrpoConfig(lora=LoraSettings(rank=2, adapter_name="polar")), control, tmp_path)
    assert isinstance(sync, VllmAdapterSync)
    name = "model.layers.0.self_attn.q_proj"
    adapter = {f"{name}.lora_A.default.weight": torch.ones(2, 8), f"{name}.lora_B.default.weight": torch.ones(8, 2)}
    await sync.push(MergedWeights({}, adapter, LoraSettings(rank=2)), "4")
    routes = ["/pause?mode=keep", "/v1/load_lora_adapter", "/update_weight_version", "/resume"]
    assert [path for path, _ in told] == routes
    body = orjson.loads(told[1][1])
    assert body == {"lora_name": "polar", "lora_path": str(tmp_path / "polar"), "load_inplace": True}
    written = load_file(tmp_path / "polar" / "adapter_model.safetensors")
    assert set(written) == {f"base_model.model.{name}.lora_{side}.weight" for side in "AB"}
    with pytest.raises(TrainingError, match="no adapter"):
        await sync.push({}, "5")


def test_without_a_name_the_merged_weights_are_reloaded(tmp_path: Path) -> None:
    for lora in (None, LoraSettings(rank=2)):
        assert type(make_vllm_sync(GrpoConfig(lora=lora), VllmControl("http://engine"), tmp_path)) is VllmDiskSync
