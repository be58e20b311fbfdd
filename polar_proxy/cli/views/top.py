"""The view of `polar top`: engine, stages, rates, active sessions and newest failures, in 80 columns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polar_proxy.cli.output import format_counts, format_seconds, make_table, styled
from polar_proxy.terminal import one_line

if TYPE_CHECKING:
    from polar_proxy.api_models import Activity, EngineState, ServiceState, StageLimitState

_BAR_WIDTH = 20


def top_view(place: str, service: ServiceState | None, activity: Activity) -> RenderableType:
    """Return the view of a server, or of a database if `service` is None. `place`: the URL to show."""
    parts: list[RenderableType] = [styled("[bold]Polar[/] {}  {}", place, time.strftime("%H:%M:%S"))]
    if service is not None:
        parts += _service_lines(service)
    parts.append(_rates(activity))
    if activity.rollouts:
        parts.append(Text(f"rollouts   {format_counts(activity.rollouts)}"))
    if service is not None and service.stages:
        parts += [Text(), _stages(service)]
    parts += [Text(), _sessions(activity)]
    if activity.failures:
        parts += [Text(), Text("newest failures", "dim"), *_failures(activity)]
    return Group(*parts)


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """Return a bar of `width` characters, filled to `share` (0 to 1)."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def _service_lines(service: ServiceState) -> Iterator[RenderableType]:
    if service.engine is not None:
        yield from _engine_lines("engine", service.engine)
    for name, engine in service.engines.items():
        yield from _engine_lines(one_line(name, 10), engine)
    if service.worker is not None:
        state = service.problem or service.state
        yield styled("worker     {}  {}  {} in flight", service.worker, state, service.in_flight)
    yield styled("servers    {}  {} in flight", service.fleet.state, service.fleet.in_flight)
    if service.feed:
        yield Text(f"feed       {format_counts(service.feed)}")
    if service.pool is not None and service.pool.size:
        pool = service.pool
        yield Text(f"sandboxes  {pool.waiting} of {pool.size} warm, {pool.hits} hits, {pool.misses} misses")


def _engine_lines(name: str, engine: EngineState) -> Iterator[RenderableType]:
    colour, state = ("green", "healthy") if engine.healthy else ("red", engine.reason or "does not answer")
    policy = "" if engine.policy_version is None else f"  policy {engine.policy_version}"
    words = (f"{name:<10}", engine.kind, engine.version, engine.model, state, policy)
    yield styled(f"{{}} {{}} {{}}  {{}}  [{colour}]{{}}[/]{{}}", *words)
    load = engine.load or {}
    figures = [
        f"{load[name]} {what}"
        for name, what in (("running", "running"), ("waiting", "in the queue"), ("replicas", "replicas"))
        if load.get(name) is not None and (name != "replicas" or load[name] > 1)
    ]
    if (usage := load.get("kv_usage")) is not None:
        figures.append(f"KV {bar(usage)} {usage:.0%}")
    if figures:
        yield Text(one_line(f"           {', '.join(figures)}"))


def _rates(activity: Activity) -> Text:
    rates = activity.rates
    cached = rates.cached_tokens / rates.prompt_tokens if rates.prompt_tokens else 0.0
    failed = f" ([red]{rates.failed_calls} failed[/])" if rates.failed_calls else ""
    bad = f" ({rates.rollouts_not_done} not done)" if rates.rollouts_not_done else ""
    return styled(
        f"per minute {{}} calls{failed}, {{}} prompt tokens ({{}} cached)\n           {{}} sampled tokens, "
        "{} rollouts{}",
        *(f"{rates.calls:,}", f"{rates.prompt_tokens:,}", f"{cached:.0%}", f"{rates.completion_tokens:,}"),
        *(rates.rollouts, bad),
    )


def _stages(service: ServiceState) -> Table:
    rows = (
        (name, bar(stage.inside / stage.limit, 12), stage.inside, stage.limit, stage.waiting, _mean_wait(stage))
        for name, stage in (service.stages or {}).items()
    )
    columns = ("stage", "", "inside", "limit", "waiting", "mean wait")
    return make_table(columns, rows, right=("inside", "limit", "waiting", "mean wait"))


def _mean_wait(stage: StageLimitState) -> str:
    return format_seconds(stage.waited_seconds / stage.entered) if stage.entered else "-"


def _sessions(activity: Activity) -> RenderableType:
    if not activity.sessions:
        return Text("no session was active in the last five minutes", "dim")
    now = time.time()
    rows = (
        (
            one.session_id,
            Text(one_line(one.label or one.rollout_id or "-"), no_wrap=True, overflow="ellipsis"),
            one.calls,
            one.failed_calls,
            one.completion_tokens,
            "-" if one.last_call_at is None else f"{max(0.0, now - one.last_call_at):.0f}",
        )
        for one in activity.sessions
    )
    numbers = ("calls", "failed", "sampled", "s ago")
    return make_table(("session", "label", *numbers), rows, right=numbers, wrap=("label",))


def _failures(activity: Activity) -> Iterator[Text]:
    for one in activity.failures:
        at = time.strftime("%H:%M:%S", time.localtime(one.at))
        error = "" if one.error is None else f": {one_line(one.error)}"
        yield Text(f"{at} {one.record_id} {one_line(one.what)}{error}", no_wrap=True, overflow="ellipsis")
