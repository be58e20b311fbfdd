"""mini-swe-agent with a client that starts in half a second, so that a learning run fits into half an hour.

`--harness examples.learn.harness:QuickMini`. The agent, its prompts, its tool and its loop are `mini-swe-agent`'s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness_adapters.base import Installation, LaunchContext, LaunchPlan
from harness_adapters.mini_swe_agent import MiniSweAgent

CLIENT = Path(__file__).resolve().parent / "client"

MAX_STEPS = 6
"""Solving a task takes five steps. A policy that needs more only costs time."""


class QuickMini(MiniSweAgent):
    """`MiniSweAgent` without litellm."""

    def install(self, cache_root: Path, version: str | None = None) -> Installation:
        installed = super().install(cache_root, version)
        return replace(installed, mounts=(*installed.mounts, CLIENT))

    def launch(self, installed: Installation, context: LaunchContext) -> LaunchPlan:
        plan = super().launch(installed, replace(context, max_steps=min(context.max_steps, MAX_STEPS)))
        own = ("--model", context.model, "--config", "model.model_class=direct_model.DirectModel")
        return replace(plan, argv=(*plan.argv, *own), env={**plan.env, "PYTHONPATH": str(CLIENT)})
