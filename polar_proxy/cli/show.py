"""`polar sessions` and `polar show`: print recorded sessions, rollouts and calls."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.text import Text

from polar_proxy.cli import options
from polar_proxy.cli.common import load_settings, with_store
from polar_proxy.cli.output import format_number, format_time, last_command, make_table, out, print_result, styled
from polar_proxy.errors import UsageError
from polar_proxy.terminal import message_lines
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.store import Store

_CALL_FIELDS = (
    *("call_id", "session_id", "dialect", "path", "stream", "model", "engine", "weight_version", "logprob_mode"),
    *("status", "http_status", "error", "edge", "parent_call_id", "params", "sampling"),
    *("started_at", "first_token_at", "ended_at", "cached_tokens"),
)
_NUMBERS = ("calls", "failed", "prompt", "sampled", "s")


def sessions(
    limit: Annotated[int, typer.Option(min=1, help="Only the newest N sessions.")] = 20,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """List sessions, newest first."""
    rows = with_store(load_settings(db), lambda store: store.sessions.recent(limit=limit))
    cells = (
        (
            row.session_id,
            row.label or row.origin,
            format_time(row.created_at),
            row.calls,
            row.failed_calls,
            row.prompt_tokens,
            row.completion_tokens,
            format_time(row.last_call_at),
            row.incomplete,
            row.rollout_id,
        )
        for row in rows
    )
    columns = (
        "session",
        "label",
        "opened",
        "calls",
        "failed",
        "prompt",
        "sampled",
        "last call",
        "incomplete",
        "rollout",
    )
    print_result({"sessions": rows}, make_table(columns, cells, right=_NUMBERS), as_json)


def show(
    ident: Annotated[str, typer.Argument(metavar="ROLLOUT|SESSION|CALL", help="Id of a rollout, a session or a call.")],
    tokens: Annotated[bool, typer.Option(help="For a call: print every token id with its log-probability.")] = False,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a rollout, a session or a call in full."""
    kinds = {
        "roll": (_load_rollout, _print_rollout),
        "sess": (_load_session, _print_session),
        "call": (_load_call, lambda call: _print_call(call, tokens)),
    }
    kind = ident.partition("_")[0]
    if kind not in kinds:
        raise UsageError(f"{ident!r} is not an id: ids begin with roll_, sess_ or call_ (see `polar sessions`).")
    read, show_found = kinds[kind]

    async def load(store: Store) -> Json:
        found = await read(store, ident)
        if found is None:
            raise UsageError(f"There is no {ident} in {store.display_url}.")
        return found

    found = with_store(load_settings(db), load)
    print_result(found, lambda: show_found(found), as_json)


async def _load_rollout(store: Store, rollout_id: str) -> Json | None:
    row = await store.rollouts.get(rollout_id)
    if row is None:
        return None
    task = await store.tasks.get(row.task_id)
    return {
        **asdict(row),
        "instruction": task.instruction if task else None,
        "rewards": await store.rewards.of_rollout(rollout_id),
        "events": await store.rollouts.events(rollout_id),
        "artifacts": [
            {**asdict(item), "path": str(item.path)} for item in await store.artifacts.of_rollout(rollout_id)
        ],
        "session": await _load_session(store, row.session_id) if row.session_id else None,
    }


async def _load_session(store: Store, session_id: str) -> Json | None:
    summary = await store.sessions.summary(session_id)
    if summary is None:
        return None
    from polar_proxy.traces.grades import off_distribution_note

    calls = await store.calls.of_session(session_id)
    answers = {call.call_id: last_command(call.choices[0].message) if call.choices else "" for call in calls}
    rows = await store.calls.summaries(session_id)
    traces = await store.traces.find(session_id=session_id)
    return {
        **asdict(summary),
        "calls": [{**asdict(row), "said": answers.get(row.call_id, "")} for row in rows],
        "note": next(filter(None, map(off_distribution_note, calls)), None),
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
        "excluded": dict(await store.traces.exclusions(session_id)),
    }


async def _load_call(store: Store, call_id: str) -> Json | None:
    """Return all data of a call.

    `messages` and `tools` are in the dialect's own form, as the agent sent them; `conversation` has both in OpenAI's.
    """
    from polar_proxy.export import conversation

    call = await store.calls.get(call_id)
    if call is None:
        return None
    return {name: getattr(call, name) for name in _CALL_FIELDS} | {
        "messages": [orjson.loads(message) for message in call.messages],
        "tools": None if call.tools is None else orjson.loads(call.tools),
        "conversation": conversation(call),
        "prompt_ids": None if call.prompt_ids is None else call.prompt_ids.tolist(),
        "choices": [
            {
                "index": choice.index,
                "message": choice.message.to_openai(),
                "finish_reason": choice.finish_reason,
                "token_ids": choice.token_ids.tolist(),
                "logprobs": choice.logprobs.tolist(),
            }
            for choice in call.choices
        ],
    }


def _print_rollout(rollout: Json) -> None:
    reward = format_number(rollout["reward"])
    out.print(styled("[bold]{}[/]  {}  reward {}", rollout["rollout_id"], rollout["status"], reward))
    out.print(styled("task {}  harness {}  sandbox {}", rollout["task_id"], rollout["harness"], rollout["sandbox"]))
    out.print(styled("engine {}  model {}", rollout["engine"], rollout["model"]))
    if rollout["error"]:
        out.print(Text(message_lines(rollout["error"]), "yellow"))
    if signs := sorted({sign for given in rollout["rewards"] for sign in given.detail.get("signs", ())}):
        out.print(styled("[yellow]signs of reward hacking: {}[/]", ", ".join(signs)))
    if rollout["instruction"]:
        out.print(f"\n{rollout['instruction'].strip()}\n")
    for item in rollout["artifacts"]:
        out.print(styled("artifact {}: {}", item["name"], item["path"]), soft_wrap=True)
    if rollout["session"] is not None:
        _print_session(rollout["session"])


def _print_session(session: Json) -> None:
    out.print(f"session {session['session_id']}")
    rows = (
        (
            call["call_id"],
            call["edge"],
            call["status"],
            call["prompt_tokens"] or "-",
            call["completion_tokens"],
            f"{call['ended_at'] - call['started_at']:.2f}",
            call["finish_reason"],
            call["said"][:60],
        )
        for call in session["calls"]
    )
    columns = ("call", "edge", "status", "prompt", "sampled", "s", "finish", "answer")
    out.print(make_table(columns, rows, right=_NUMBERS))
    if session["note"]:
        out.print(Text(session["note"], "yellow"))
    for trace in session["traces"]:
        size = f"{trace['tokens']} tokens, {trace['trained_tokens']} trained, {len(trace['calls'])} calls"
        out.print(f"trace {trace['trace_id']}: {trace['grade']}, {size}")
    for call_id, reason in session["excluded"].items():
        out.print(styled("not trained: {} ({})", call_id, reason))


def _print_call(call: Json, tokens: bool) -> None:
    say = partial(out.print, soft_wrap=True)  # recorded texts keep their own line breaks
    say(styled("[bold]{}[/]  {}  {} {}", call["call_id"], call["status"], call["dialect"], call["path"]))
    say(f"session {call['session_id']}  edge {call['edge']}  parent {call['parent_call_id'] or '-'}")
    if call["error"]:
        say(Text(message_lines(call["error"]), "yellow"))
    if problem := call["conversation"].get("unparsed"):
        say(styled("[yellow]shown as received, because it cannot be parsed: {}[/]", problem))
    if names := _tool_names(call["conversation"]["tools"]):
        say(styled("tools {}", ", ".join(names)))
    for message in call["conversation"]["messages"]:
        if problem:
            heading, text = "raw", orjson.dumps(message).decode()
        else:
            heading, text = _heading(message), _message_text(message)
        say(styled("\n[cyan]{}[/]", heading))
        say(text)
    for choice in call["choices"]:
        details = f"choice {choice['index']}, {len(choice['token_ids'])} tokens, {choice['finish_reason']}"
        say(styled("\n[green]assistant[/] [dim]({})[/]", details))
        say(_message_text(choice["message"]))
        if tokens:
            pairs = zip(choice["token_ids"], choice["logprobs"], strict=True)
            say(" ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs))


def _tool_names(tools: Any) -> list[str]:
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]


def _heading(message: Json) -> str:
    """Return the role, and for a tool result the id of the tool call."""
    call_id = message.get("tool_call_id")
    return f"{message['role']} {call_id}" if call_id else str(message["role"])


def _message_text(message: Json) -> str:
    """Return the reasoning in parentheses, then the text, then the tool calls."""
    reasoning = message.get("reasoning_content")
    calls = [
        f"-> {call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls") or []
    ]
    text = _content_text(message.get("content"))
    return "\n".join(part for part in (f"({reasoning})" if reasoning else "", text, *calls) if part)


def _content_text(content: Any) -> str:
    """Return one line for each content part; images and files appear as their type."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content if isinstance(content, str) else orjson.dumps(content).decode() if content else ""
    return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in content)
