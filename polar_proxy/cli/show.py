"""`polar sessions`, `polar show`: looking at what was recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.live import last_command
from polar_proxy.errors import UsageError
from polar_proxy.export import conversation
from polar_proxy.store import SessionSummary, Store
from polar_proxy.types import CallRecord, Json


def sessions(
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """List sessions, newest first."""
    settings = common.load_settings(db)

    async def work() -> list[SessionSummary]:
        async with common.reader(settings) as store:
            return await store.sessions.recent(limit=limit)

    rows = common.run_async(work())
    if as_json:
        common.print_json({"sessions": [asdict(row) for row in rows]})
        return
    table = _table("session", "label", "opened", "calls", "failed", "prompt", "sampled", "last call", "rollout")
    for row in rows:
        table.add_row(
            row.session_id,
            escape(row.label or row.origin),
            _when(row.created_at),
            str(row.calls),
            str(row.failed_calls),
            str(row.prompt_tokens),
            str(row.completion_tokens),
            _when(row.last_call_at),
            row.rollout_id or "-",
        )
    common.out.print(table)


def show(
    ident: Annotated[str, typer.Argument(metavar="ROLLOUT|SESSION|CALL", help="An id, as listed.")],
    tokens: Annotated[bool, typer.Option(help="Call: every token id with its log-probability.")] = False,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a rollout, a session or a call, whole."""
    settings = common.load_settings(db)

    async def work() -> tuple[str, Json]:
        async with common.reader(settings) as store:
            kind = ident.partition("_")[0]
            loaders = {"roll": _rollout, "sess": _session, "call": _call}
            if kind not in loaders:
                raise UsageError(f"{ident!r} is no id: ids begin with roll_, sess_ or call_ (see `polar sessions`).")
            found = await loaders[kind](store, ident)
            if found is None:
                raise UsageError(f"There is no {ident} in {store.display_url}.")
            return kind, found

    kind, found = common.run_async(work())
    if as_json:
        common.print_json(found)
    elif kind == "call":
        _print_call(found, tokens)
    else:
        _print_run(found)


async def _rollout(store: Store, ident: str) -> Json | None:
    row = await store.rollouts.get(ident)
    if row is None:
        return None
    task = await store.tasks.get(row.task_id)
    session = await _session(store, row.session_id) if row.session_id else None
    return {
        **asdict(row),
        "instruction": task.instruction if task else None,
        "rewards": [asdict(reward) for reward in await store.rewards.of_rollout(ident)],
        "events": [asdict(event) for event in await store.rollouts.events(ident)],
        "artifacts": [{**asdict(item), "path": str(item.path)} for item in await store.artifacts.of_rollout(ident)],
        "session": session,
    }


async def _session(store: Store, ident: str) -> Json | None:
    summary = await store.sessions.summary(ident)
    if summary is None:
        return None
    calls = await store.calls.of_session(ident)
    commands = {call.call_id: last_command(call.choices[0].message) if call.choices else "" for call in calls}
    traces = await store.traces.find(session_id=ident)
    return {
        **asdict(summary),
        "calls": [{**asdict(row), "said": commands.get(row.call_id, "")} for row in await store.calls.summaries(ident)],
        "traces": [
            {
                "trace_id": trace.trace_id,
                "builder": trace.builder,
                "grade": trace.grade,
                "tokens": len(trace.token_ids),
                "trained_tokens": int(trace.loss_mask.sum()),
                "calls": list(trace.call_ids),
                "reward": trace.reward,
            }
            for trace in traces
        ],
        "excluded": dict(await store.traces.exclusions(ident)),
    }


async def _call(store: Store, ident: str) -> Json | None:
    call = await store.calls.get(ident)
    return None if call is None else call_json(call)


def call_json(call: CallRecord) -> Json:
    """A call with everything, as JSON: arrays as lists.

    `messages` and `tools` are as they came, in the dialect's own form; `conversation` holds both in OpenAI's.
    """
    return {
        "call_id": call.call_id,
        "session_id": call.session_id,
        "dialect": call.dialect,
        "path": call.path,
        "stream": call.stream,
        "model": call.model,
        "engine": {**asdict(call.engine), "capabilities": sorted(call.engine.capabilities)} if call.engine else None,
        "weight_version": call.weight_version,
        "logprob_mode": call.logprob_mode,
        "status": call.status,
        "http_status": call.http_status,
        "error": call.error,
        "edge": call.edge,
        "parent_call_id": call.parent_call_id,
        "messages": [orjson.loads(message) for message in call.messages],
        "tools": None if call.tools is None else orjson.loads(call.tools),
        "conversation": conversation(call),
        "params": call.params,
        "sampling": call.sampling,
        "prompt_ids": None if call.prompt_ids is None else call.prompt_ids.tolist(),
        "choices": [
            {
                "index": choice.index,
                "message": choice.message,
                "finish_reason": choice.finish_reason,
                "token_ids": choice.token_ids.tolist(),
                "logprobs": [float(value) for value in choice.logprobs],
            }
            for choice in call.choices
        ],
        "started_at": call.started_at,
        "first_token_at": call.first_token_at,
        "ended_at": call.ended_at,
        "cached_tokens": call.cached_tokens,
    }


def _print_run(found: Json) -> None:
    say = common.out.print
    session: Any = found
    if "rollout_id" in found and "status" in found:
        reward = "-" if found["reward"] is None else f"{found['reward']:g}"
        say(f"[bold]{found['rollout_id']}[/]  {found['status']}  reward {reward}", highlight=False)
        say(f"task {found['task_id']}  harness {found['harness']}  sandbox {found['sandbox']}", highlight=False)
        say(f"engine {found['engine']}  model {found['model']}", highlight=False)
        if found["error"]:
            say(f"[yellow]{escape(found['error'])}[/]", highlight=False)
        if found["instruction"]:
            say(f"\n{escape(found['instruction'].strip())}\n", highlight=False)
        for item in found["artifacts"]:
            say(f"artifact {item['name']}: {item['path']}", highlight=False, soft_wrap=True)
        session = found["session"]
    if session is None:
        return
    say(f"session {session['session_id']}", highlight=False)
    table = _table("call", "edge", "status", "prompt", "sampled", "s", "finish", "said")
    for call in session["calls"]:
        row = [call["call_id"], call["edge"], call["status"], str(call["prompt_tokens"] or "-")]
        seconds = f"{call['ended_at'] - call['started_at']:.2f}"
        table.add_row(
            *row, str(call["completion_tokens"]), seconds, call["finish_reason"] or "-", escape(call["said"][:60])
        )
    say(table)
    for trace in session["traces"]:
        told = f"{trace['tokens']} tokens, {trace['trained_tokens']} trained, {len(trace['calls'])} calls"
        say(f"trace {trace['trace_id']}: {trace['grade']}, {told}", highlight=False)
    for call_id, reason in session["excluded"].items():
        say(f"not trained: {call_id} ({reason})", highlight=False)


def _print_call(call: Json, tokens: bool) -> None:
    say = partial(common.out.print, highlight=False, soft_wrap=True)  # what was said has its own line breaks alone
    say(f"[bold]{call['call_id']}[/]  {call['status']}  {call['dialect']} {call['path']}")
    say(f"session {call['session_id']}  edge {call['edge']}  parent {call['parent_call_id'] or '-'}")
    if call["error"]:
        say(f"[yellow]{escape(call['error'])}[/]")
    if problem := call["conversation"].get("unparsed"):
        say(f"[yellow]shown as it came, since it cannot be read: {escape(problem)}[/]")
    if names := _tool_names(call["conversation"]["tools"]):
        say(f"tools {escape(', '.join(names))}")
    for message in call["conversation"]["messages"]:
        heading, text = ("raw", orjson.dumps(message).decode()) if problem else (_heading(message), _readable(message))
        say(f"\n[cyan]{escape(heading)}[/]")
        say(escape(text))
    for choice in call["choices"]:
        said = f"choice {choice['index']}, {len(choice['token_ids'])} tokens, {choice['finish_reason']}"
        say(f"\n[green]assistant[/] [dim]({said})[/]")
        say(escape(_readable(choice["message"])))
        if tokens:
            pairs = zip(choice["token_ids"], choice["logprobs"], strict=True)
            say(" ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs))


def _tool_names(tools: Any) -> list[str]:
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]


def _heading(message: Json) -> str:
    """The role; of a tool's result also the call that it answers."""
    answers = message.get("tool_call_id")
    return f"{message['role']} {answers}" if answers else str(message["role"])


def _readable(message: Json) -> str:
    """Reasoning in brackets, the text, then the calls."""
    reasoning = message.get("reasoning_content")
    calls = [
        f"-> {call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls") or []
    ]
    text = _text(message.get("content"))
    return "\n".join(part for part in (f"({reasoning})" if reasoning else "", text, *calls) if part)


def _text(content: Any) -> str:
    """Content parts a line each; an image or a file by its kind, since its data says nothing to a reader."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content if isinstance(content, str) else orjson.dumps(content).decode() if content else ""
    return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)


def _table(*columns: Sequence[str] | str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in columns:
        right = name in ("calls", "failed", "prompt", "sampled", "s")
        table.add_column(str(name), justify="right" if right else "left", no_wrap=True)
    return table


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
