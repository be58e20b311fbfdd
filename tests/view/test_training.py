"""Pages of training runs: curves of several runs over each other, steps with their groups, paging."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from polar_proxy.store import Store
from polar_proxy.view.curves import HEIGHT, WIDTH, draw_panels
from polar_proxy.view.pages.training import PAGE


def step(number: int, **values: Any) -> dict[str, Any]:
    common = {"reward": 0.5, "rollouts": 8, "trained_rollouts": 4, "trained_tokens": 100, "dropped_stale": 0}
    lists = {"groups": [f"group_{number}"], "skipped": {"no_spread": {"rollouts": 4, "traces": 4, "tokens": 40}}}
    return {"kind": "step", "step": number, "at": float(number), **common, **lists, **values}


def test_a_curve_spans_its_panel() -> None:
    (panel, *_) = draw_panels([("a", [step(1, reward=0.0), step(2, reward=0.5), step(3, reward=1.0)])])
    assert panel.title == "Reward"
    (curve,) = panel.curves
    assert panel.path(curve) == f"M0.0 {HEIGHT:.1f}L{WIDTH / 2:.1f} {HEIGHT / 2:.1f}L{WIDTH:.1f} 0.0"
    assert (panel.low, panel.high, panel.first, panel.last) == (0.0, 1.0, 1, 3)


@pytest.mark.parametrize(
    ("value", "low", "high", "y"), [(0.5, 0.0, 0.5, 0), (-0.5, -0.5, 0.0, HEIGHT), (0.0, 0.0, 1.0, HEIGHT)]
)
def test_a_single_value_is_a_dot_on_an_axis_that_has_zero(value: float, low: float, high: float, y: float) -> None:
    (panel, *_) = draw_panels([("a", [step(1, reward=value)])])
    assert (panel.low, panel.high, panel.path(panel.curves[0])) == (low, high, f"M0.0 {y:.1f}h0")


def test_runs_share_the_axes_of_a_panel() -> None:
    (panel, *_) = draw_panels([("a", [step(1, reward=0.0)]), ("b", [step(1, reward=1.0), step(4, reward=2.0)])])
    assert [(curve.run, curve.values) for curve in panel.curves] == [(0, [0.0]), (1, [1.0, 2.0])]
    assert (panel.high, panel.last) == (2.0, 4)


def test_values_that_are_missing_or_not_finite_are_left_out() -> None:
    panels = draw_panels([("a", [step(1, loss=math.nan), step(2, loss=0.25), step(3)])])
    loss = next(panel for panel in panels if panel.title == "Loss")
    assert (loss.curves[0].steps, loss.curves[0].values) == ([2], [0.25])
    assert "Entropy" not in [panel.title for panel in panels]


async def test_the_legend_has_the_dashes_of_its_curves(pages: httpx.AsyncClient, store: Store) -> None:
    held_out = {"kind": "eval", "step": 0, "at": 1.0, "reward": 0.25}
    await store.training.put_run("run_1", "first", {}, [held_out])
    page = (await pages.get("/view/training/run_1")).text
    assert '<path class="run0 dash1 dot"' in page
    assert '<span class="name dash1"><i aria-hidden="true"></i>held out</span>' in page


@pytest.fixture
async def two_runs(store: Store) -> None:
    steps = [step(number, reward=number / PAGE, loss=0.1) for number in range(1, PAGE + 11)]
    held_out = {"kind": "eval", "step": PAGE, "at": 1.0, "reward": 0.75}
    await store.training.put_run("run_1", "<b>first</b>", {}, [*steps, held_out])
    await store.training.put_run("run_2", "second", {}, [step(1, reward=0.25)])


@pytest.mark.usefixtures("two_runs")
async def test_a_run_shows_its_curves_and_steps(pages: httpx.AsyncClient) -> None:
    page = (await pages.get("/view/training/run_1")).text
    assert "<b>first</b>" not in page
    assert "&lt;b&gt;first" in page
    assert page.count('<figure class="panel">') >= 3
    assert "held out" in page
    assert 'href="/view/groups/group_60"' in page
    assert 'href="/view/groups/group_10"' not in page
    older = (await pages.get("/view/training/run_1?before=11")).text
    assert 'href="/view/groups/group_10"' in older


@pytest.mark.usefixtures("two_runs")
async def test_other_runs_are_drawn_over_it(pages: httpx.AsyncClient) -> None:
    page = (await pages.get("/view/training/run_1", params={"with": ["run_2", "run_unknown"]})).text
    assert 'class="run1 dash0 dot"' in page
    assert 'value="run_2" checked' in page


async def test_an_unknown_run_is_not_found(pages: httpx.AsyncClient) -> None:
    assert (await pages.get("/view/training/nothing")).status_code == 404


@pytest.mark.usefixtures("two_runs")
async def test_a_run_is_found_by_its_id(pages: httpx.AsyncClient) -> None:
    assert (await pages.get("/view/find?name=run_2")).headers["location"] == "/view/training/run_2"


@pytest.mark.parametrize("value", ["<i>x</i>", [1], {"a": 1}, None, True, 10**400, 1e308])
async def test_a_line_of_another_form_does_not_hide_its_run(pages: httpx.AsyncClient, store: Store, value: Any) -> None:
    names = [*step(1), "loss", "step_seconds", "engine_busy_seconds", "entropy"]
    strange = {name: value for name in names if name not in ("kind", "step", "at")}
    lines = [{"kind": "step", "step": 1, "at": 1.0}, {"kind": "step", "step": 2, "at": 1.0, **strange}]
    await store.training.put_run("run_1", "first", {}, lines)
    answer = await pages.get("/view/training/run_1")
    assert answer.status_code == 200
    assert "<i>x" not in answer.text
