"""The guide's line on distillation: record a hosted agent, export, train the small model, measure on the same tasks."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from polar_proxy.dialects import get_dialect
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.traces.check import check_row
from polar_proxy.types import ChatRequest, Json
from tests.cli.runner import polar_json, polar_ok
from tests.fakes.player import play
from tests.fakes.providers import KEY, AnthropicProvider, Scripted
from tests.fakes.tiny_agent import TINY_AGENTS
from tests.hosted.stand_ins import running

pytestmark = pytest.mark.full

HARNESS = "tests.fakes.tiny_agent:TinyAgent"


def strong_model(body: Json) -> Scripted:
    """Solve `swe-task`."""
    parsed = get_dialect("anthropic_messages").parse(body)
    (request,) = parsed.requests
    assert isinstance(request, ChatRequest)
    call = play(request)
    return Scripted("Next.", reasoning="I go on.", calls=(("bash", orjson.loads(call.arguments)),))  # type: ignore[union-attr]


def rows(path: Path) -> list[Json]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def train(path: Path, folder: Path) -> tuple[float, float]:
    """Take a few steps of SFT on the rows, save the model, and return the loss before and after."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(POLAR_TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        total = torch.zeros(())
        for row in rows(path):
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])[:, :1024]
            mask = torch.tensor([0] * len(row["prompt_ids"]) + row["loss_mask"])[:1024].bool()
            labels = torch.where(mask, ids, -100)
            total = total + model(input_ids=ids, labels=labels).loss
        losses.append(float(total))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(POLAR_TINY).save_pretrained(folder)
    return losses[0], losses[-1]


def test_a_hosted_agent_is_recorded_exported_and_distilled(
    polar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_ALLOWED_CODE", orjson.dumps(sorted(TINY_AGENTS)).decode())
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    task = ("swe-task", "--instances", "1", "--harness", HARNESS, "--sandbox", "process")
    api = AnthropicProvider()
    api.model_of = strong_model
    with running(api):
        hosted = ("--engine", "anthropic", "--engine-url", api.url, "--model", api.model)
        first = polar_json("run", *task, *hosted)
        assert [row["reward"] for row in first["rollouts"]] == [1.0]

    sft, tokens, student = tmp_path / "sft.jsonl", tmp_path / "tokens.jsonl", tmp_path / "student"
    polar_ok("export", "--format", "chat-jsonl", "--where", "reward>=1", "--out", str(sft))
    (row,) = rows(sft)
    assert row["messages"][-1]["role"] == "assistant"
    assert (row["reward"], row["trace_id"]) == (1.0, None)
    assert row["price_usd"] > 0

    done = polar_json("rescore", "--where", "engine=anthropic", "--engine", "local")
    assert (done["skipped"], done["calls"]) == ({}, len(row["messages"]) // 2)
    polar_ok("export", "--format", "tokens-jsonl", "--builder", "rescored", "--all-grades", "--out", str(tokens))
    for traced in rows(tokens):
        assert list(check_row(traced).problems) == []
        assert traced["grade"] == "approximate"
        assert traced["certificate"]["grade_reasons"] == ["rescored", "summarised"]

    before, after = train(tokens, student)
    assert after < before
    measured = polar_json("run", *task, "--engine", "local", "--model", str(student), "--max-tokens", "64")
    assert [row["task_id"] for row in measured["rollouts"]] == [row["task_id"] for row in first["rollouts"]]
    assert all(row["reward"] is not None for row in measured["rollouts"])
    assert KEY.encode() not in (polar_home / "polar.db").read_bytes()
