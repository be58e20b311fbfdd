"""`polar sessions` and `polar show`: print recorded sessions, rollouts and calls."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.text import Text

from polar_proxy.cli import options
from polar_proxy.cli.common import load_client_settings, open_database, read_store_or_server, run_async
from polar_proxy.cli.output import format_price, format_time, make_table, out, print_note, print_result, styled
from polar_proxy.cli.views.story import print_choice_tokens, print_rollout, print_session
from polar_proxy.errors import UsageError
from polar_proxy.message_text import content_text
from polar_proxy.terminal import message_lines
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.api_models import CallDetail, CallUsage, Record, SessionList
    from polar_proxy.config import Settings
    from polar_proxy.store import Store

_NUMBERS = ("calls", "failed", "prompt", "sampled", "USD")
_OPTIONAL = ("USD", "spent", "incomplete", "rollout")


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
        *("spent", "last call", "incomplete", "rollout"),
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
            row.spent,
            format_time(row.last_call_at),
            row.incomplete,
            row.rollout_id,
        )
        for row in found.sessions
    )
    print_result(found, make_table(columns, cells, right=_NUMBERS, optional=_OPTIONAL), as_json)
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
        bool,
        typer.Option(
            help="Show the sampled tokens. On a terminal: the text, coloured by log-probability. Elsewhere: one line "
            "for each token, with its text and log-probability."
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a rollout or session to this file, as one page that can be shared.", metavar="FILE"),
    ] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a rollout or a session as a story, or a call in full."""
    if html is not None:
        _write_html(name, html, load_client_settings(url, db))
        return

    async def read(store: Store, settings: Settings) -> Record:
        from polar_proxy.records import find_record

        return await find_record(store, name, tokens_from=settings.engine if tokens else None)

    found = read_store_or_server(url, db, read, lambda client: client.record(name, tokens=tokens))
    if found.rollout is not None:
        print_result(found.rollout, partial(print_rollout, found.rollout), as_json)
    elif found.session is not None:
        print_result(found.session, partial(print_session, found.session), as_json)
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


def _print_call(call: CallDetail, tokens: bool) -> None:
    say = partial(out.print, soft_wrap=True)  # recorded texts keep their own line breaks
    say(styled("[bold]{}[/]  {}  {} {}", call.call_id, call.status, call.dialect, call.path))
    say(f"session {call.session_id}  edge {call.edge}  parent {call.parent_call_id or '-'}")
    if call.reason:
        say(styled("[dim]{}: {}[/]", call.rule, call.reason))
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
            print_choice_tokens(choice)
    if call.texts_problem:
        say(Text(message_lines(f"The tokens are shown without their texts. {call.texts_problem}"), "yellow"))


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


def _tool_names(tools: Any) -> list[str]:
    functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
    return [str(function.get("name")) for function in functions if isinstance(function, dict)]


def _heading(message: Json) -> str:
    """Return the role of a message, followed by the id of the tool call if the message is a tool's result."""
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
