"""`polar sessions` and `polar show`: print recorded sessions, rollouts and calls."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.text import Text

from polar_proxy.cli import options
from polar_proxy.cli.common import load_client_settings, open_database, read_store_or_server, run_async
from polar_proxy.cli.output import format_number, format_time, make_table, out, print_note, print_result, styled
from polar_proxy.errors import UsageError
from polar_proxy.terminal import message_lines
from polar_proxy.types import Json, content_text

if TYPE_CHECKING:
    from polar_proxy.api_models import (
        CallChoice,
        CallDetail,
        CallUsage,
        Record,
        RolloutRecord,
        SessionDetail,
        SessionList,
    )
    from polar_proxy.config import Settings
    from polar_proxy.store import Store

_NUMBERS = ("calls", "failed", "prompt", "sampled", "USD", "s")


def sessions(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Only the newest N sessions.")] = 20,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """List sessions, newest first."""

    async def read(store: Store, settings: Settings) -> SessionList:
        from polar_proxy.records import list_sessions

        return await list_sessions(store, limit=limit)

    found = read_store_or_server(url, db, read, lambda client: client.sessions(limit=limit))
    columns = (
        *("session", "label", "opened", "calls", "failed", "prompt", "sampled", "USD"),
        *("last call", "incomplete", "rollout"),
    )
    cells = (
        (
            row.session_id,
            row.label or row.origin,
            format_time(row.created_at),
            row.calls,
            row.failed_calls,
            row.prompt_tokens,
            row.completion_tokens,
            format_price(row.price_usd),
            format_time(row.last_call_at),
            row.incomplete,
            row.rollout_id,
        )
        for row in found.sessions
    )
    print_result(found, make_table(columns, cells, right=_NUMBERS), as_json)
    if not found.sessions and not as_json:
        print_note("No session is recorded yet. `polar serve`, then `polar connect`, records an agent that you start.")


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A rollout, a session or a call: its id, the beginning of its id, a session's label, or `last` for "
            "the session that was used last.",
        ),
    ],
    tokens: Annotated[
        bool, typer.Option(help="For a call: print each token with its text and log-probability.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a rollout or session to this file, as one page that can be shared.", metavar="FILE"),
    ] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a rollout, a session or a call in full."""
    if html is not None:
        _write_html(name, html, load_client_settings(url, db))
        return

    async def read(store: Store, settings: Settings) -> Record:
        from polar_proxy.records import find_record

        return await find_record(store, name, tokens_from=settings.engine if tokens else None)

    found = read_store_or_server(url, db, read, lambda client: client.record(name, tokens=tokens))
    if found.rollout is not None:
        print_result(found.rollout, partial(_print_rollout, found.rollout), as_json)
    elif found.session is not None:
        print_result(found.session, partial(_print_session, found.session), as_json)
    elif found.call is not None:
        print_result(found.call, partial(_print_call, found.call, tokens), as_json)


def _write_html(name: str, file: Path, settings: Settings) -> None:
    from polar_proxy.view.report import make_report

    if settings.url is not None:
        raise UsageError("--html reads a database. Give --db instead of --url.")

    async def write() -> None:
        async with open_database(settings) as store:
            page = await make_report(store, settings, name)
        file.write_text(page)

    run_async(write())
    out.print(styled("{}", str(file)), soft_wrap=True)


def _print_rollout(rollout: RolloutRecord) -> None:
    reward = format_number(rollout.reward)
    out.print(styled("[bold]{}[/]  {}  reward {}", rollout.rollout_id, rollout.status, reward))
    out.print(styled("task {}  harness {}  sandbox {}", rollout.task_id, rollout.harness, rollout.sandbox))
    out.print(styled("engine {}  model {}", rollout.engine, rollout.model))
    if rollout.error:
        out.print(Text(message_lines(rollout.error), "yellow"))
    if signs := sorted({sign for given in rollout.rewards for sign in given.detail.get("signs", ())}):
        out.print(styled("[yellow]signs of reward hacking: {}[/]", ", ".join(signs)))
    if rollout.instruction:
        out.print(f"\n{rollout.instruction.strip()}\n")
    for item in rollout.artifacts:
        out.print(styled("artifact {}: {}", item.name, item.path), soft_wrap=True)
    if rollout.session is not None:
        _print_session(rollout.session)


def _print_session(session: SessionDetail) -> None:
    reward = "" if session.reward is None else f"  reward {session.reward:g}"
    price = "" if session.price_usd is None else f"  {format_price(session.price_usd)} USD"
    label = f"  {session.label}" if session.label else ""
    out.print(styled("session {}{}{}{}", session.session_id, label, reward, price))
    if session.spent is not None:
        out.print(styled("[yellow]its budget is spent ({}): further calls are refused[/]", session.spent))
    rows = (
        (
            call.call_id,
            call.edge,
            call.status,
            call.prompt_tokens or call.input_tokens or "-",
            call.completion_tokens or call.output_tokens or 0,
            f"{call.ended_at - call.started_at:.2f}",
            call.finish_reason,
            call.said[:60],
        )
        for call in session.calls
    )
    columns = ("call", "edge", "status", "prompt", "sampled", "s", "finish", "answer")
    out.print(make_table(columns, rows, right=_NUMBERS, wrap=("answer",)))
    if session.note:
        out.print(Text(session.note, "yellow"))
    for trace in session.traces:
        size = f"{trace.tokens} tokens, {trace.trained_tokens} trained, {len(trace.calls)} calls"
        out.print(f"trace {trace.trace_id}: {trace.grade}, {size}")
    for call_id, reason in session.excluded.items():
        out.print(styled("not trained: {} ({})", call_id, reason))


def _print_call(call: CallDetail, tokens: bool) -> None:
    say = partial(out.print, soft_wrap=True)  # recorded texts keep their own line breaks
    say(styled("[bold]{}[/]  {}  {} {}", call.call_id, call.status, call.dialect, call.path))
    say(f"session {call.session_id}  edge {call.edge}  parent {call.parent_call_id or '-'}")
    if call.usage is not None:
        say(_usage_line(call.usage, call.price_usd))
    if not_carried := call.sampling.get("not_carried"):
        say(styled("[yellow]not carried to the provider: {}[/]", ", ".join(not_carried)))
    if call.route is not None:
        say(styled("engine {}, chosen by the rule {}", call.engine_name, call.route))
    if call.hooks is not None:
        say(styled("[yellow]changed by hooks: {}[/]", orjson.dumps(call.hooks).decode()))
    if call.error:
        say(Text(message_lines(call.error), "yellow"))
    if problem := call.conversation.get("unparsed"):
        say(styled("[yellow]shown as received, because it cannot be parsed: {}[/]", problem))
    if names := _tool_names(call.conversation["tools"]):
        say(styled("tools {}", ", ".join(names)))
    for message in call.conversation["messages"]:
        if problem:
            heading, text = "raw", orjson.dumps(message).decode()
        else:
            heading, text = _heading(message), _message_text(message)
        say(styled("\n[cyan]{}[/]", heading))
        say(text)
    for choice in call.choices:
        details = f"choice {choice.index}, {len(choice.token_ids)} tokens, {choice.finish_reason}"
        say(styled("\n[green]assistant[/] [dim]({})[/]", details))
        say(_message_text(choice.message))
        if tokens:
            say(_token_lines(choice))
    if call.texts_problem:
        say(Text(message_lines(f"The tokens are shown without their texts. {call.texts_problem}"), "yellow"))


def format_price(price: float | None) -> str:
    return "-" if price is None else f"{price:.4f}"


def _usage_line(usage: CallUsage, price: float | None) -> str:
    parts = (
        ("from the cache", usage.cached_tokens),
        ("to the cache", usage.cache_write_tokens),
        ("of reasoning", usage.reasoning_tokens),
    )
    details = [f"{count} {what}" for what, count in parts if count]
    counted = "estimated: " if usage.estimated else ""
    cost = "price unknown" if price is None else f"{format_price(price)} USD"
    tokens = f"{counted}{usage.input_tokens} prompt tokens, {usage.output_tokens} sampled"
    return f"{usage.model or 'provider'}  {', '.join([tokens, *details])}  {cost}"


def _token_lines(choice: CallChoice) -> str:
    """Return each token's id and log-probability, and its text in JSON's form, which shows spaces and line breaks.

    The tokens of a hosted answer have only their texts and the position of the character at which each begins.
    """
    if choice.token_texts is not None and not choice.token_ids:
        starts = accumulate(map(len, choice.token_texts), initial=0)
        return "\n".join(
            f"{start} {orjson.dumps(text).decode()}" for start, text in zip(starts, choice.token_texts, strict=False)
        )
    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    shown = [f"{token}:{format_number(logprob, '.3f')}" for token, logprob in pairs]
    if choice.token_texts is None:
        return " ".join(shown)
    texts = (orjson.dumps(text).decode() for text in choice.token_texts)
    return "\n".join(f"{pair} {text}" for pair, text in zip(shown, texts, strict=True))


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
    text = content_text(message.get("content"))
    return "\n".join(part for part in (f"({reasoning})" if reasoning else "", text, *calls) if part)
