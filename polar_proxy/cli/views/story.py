"""A session as a story: its calls with edge and reason, new messages, tool calls with results, and answers.

Text from agents is printed after a margin, so that no line of it looks like a line of Polar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import orjson
from rich.padding import Padding
from rich.text import Text

from polar_proxy.cli.output import format_number, format_price, out, styled
from polar_proxy.terminal import message_lines, one_line
from polar_proxy.token_scale import scale_legend, scale_step

if TYPE_CHECKING:
    from polar_proxy.api_models import CallChoice, Remark, RolloutRecord, SessionCall, SessionDetail, StoryMessage

_SHOWN_LINES, _SHOWN_END = 10, 3
"""Numbers of lines that are shown at the beginning and at the end of a long text. Its middle is left out."""
_ARGUMENT_LINES = 6
_SYSTEM_LINES = 2
_MARGIN = 4
"""Width of the margin before text from agents, in columns."""
_EDGE_COLOURS = {
    "root": "bold cyan",
    "continues": "cyan",
    "retries": "yellow",
    "rewinds": "yellow",
    "compacts": "magenta",
    "subagent": "blue",
    "side_call": "dim",
}
_ROLE_COLOURS = {"assistant": "green", "user": "cyan", "system": "dim", "developer": "dim", "tool": "magenta"}
_TOKEN_COLOURS = ("default", "green", "yellow", "magenta", "bold red")
"""The colour of each step of `token_scale`."""


def print_rollout(rollout: RolloutRecord) -> None:
    """Print a rollout's status, stages and rewards, then its session."""
    out.print(styled("[bold]{}[/]  {}  reward {}", rollout.rollout_id, rollout.status, format_number(rollout.reward)))
    out.print(styled("task {}  harness {}  sandbox {}", rollout.task_id, rollout.harness, rollout.sandbox))
    out.print(styled("engine {}  model {}", rollout.engine, rollout.model))
    if rollout.repeat_of is not None:
        out.print(styled("repeats {}", rollout.repeat_of))
        out.print(styled("[dim]`polar view {}` leads to the comparison of both[/]", rollout.rollout_id))
    for line in _stage_lines(rollout):
        out.print(line)
    if rollout.error:
        out.print(Text(message_lines(rollout.error), "yellow"))
    for reward in rollout.rewards:
        target = f" for {reward.call_id or reward.trace_id}" if reward.call_id or reward.trace_id else ""
        out.print(styled("reward {} by {}{}", format_number(reward.value), reward.source, target))
    _print_remarks(rollout.remarks)
    listed = [found for given in rollout.rewards if isinstance(found := given.detail.get("signs"), list)]
    if signs := sorted({str(sign) for found in listed for sign in found}):
        out.print(styled("[yellow]signs of reward hacking: {}[/]", ", ".join(signs)))
    if rollout.instruction:
        out.print("instruction")
        _print_text(rollout.instruction.strip())
    if rollout.session is not None:
        print_session(rollout.session)
    for item in rollout.artifacts:
        out.print(styled("artifact {}: {}", item.name, item.path), soft_wrap=True)


def print_session(session: SessionDetail) -> None:
    """Print the calls of a session in order, then its traces and the calls that no trace contains."""
    reward = "" if session.reward is None else f"  reward {session.reward:g}"
    price = "" if session.price_usd is None else f"  {format_price(session.price_usd)} USD"
    label = f"  {session.label}" if session.label else ""
    out.print(styled("session {}{}{}{}", session.session_id, label, reward, price))
    _print_remarks(session.remarks)
    if session.spent is not None:
        out.print(styled("[yellow]its budget is spent ({}): further calls are refused[/]", session.spent))
    if any(call.answers for call in session.calls):
        _print_legend()
    numbers = {call.call_id: number for number, call in enumerate(session.calls, 1)}
    for call in session.calls:
        _print_call(call, numbers, session.calls[0].started_at)
    if session.note:
        out.print(Text(session.note, "yellow"))
    if session.texts_problem:
        out.print(Text(message_lines(f"Some tokens are shown without texts. {session.texts_problem}"), "yellow"))
    for trace in session.traces:
        size = f"{trace.tokens} tokens, {trace.trained_tokens} trained, {len(trace.calls)} calls"
        out.print(f"trace {trace.trace_id}: {trace.grade}, {size}")
    for call_id, reason in session.excluded.items():
        out.print(styled("not trained: call {} {} ({})", numbers.get(call_id, "-"), call_id, reason))


def print_choice_tokens(choice: CallChoice) -> None:
    """Print the tokens of an answer: as coloured text on a terminal with colours, else one line for each token."""
    if choice.token_texts is None or not choice.token_ids or not out.is_terminal or out.no_color:
        out.print(_token_lines(choice), soft_wrap=True)
        return
    text = Text()
    for token, logprob in zip(choice.token_texts, choice.logprobs, strict=True):
        text.append(token, _colour(logprob))
    out.print(Padding(text, (0, 0, 0, _MARGIN)))
    out.print(Padding(styled("[dim]{}[/]", _token_summary(choice)), (0, 0, 0, _MARGIN)))


def _print_remarks(remarks: Sequence[Remark]) -> None:
    for remark in remarks:
        text = remark.text if remark.value is None else f"{remark.value:g} of 5"
        out.print(styled("{} by {}:", remark.kind, remark.author))
        _print_text(text or "")


def _stage_lines(rollout: RolloutRecord) -> Iterator[Text]:
    """Yield a line for each attempt: its stages with their seconds."""
    attempts = sorted({stage.attempt for stage in rollout.stages})
    for attempt in attempts:
        parts = [
            f"{stage.stage} {'...' if stage.ended_at is None else f'{stage.ended_at - stage.started_at:.1f} s'}"
            + (f" ({stage.cause or stage.outcome})" if stage.outcome not in (None, "ok") else "")
            for stage in rollout.stages
            if stage.attempt == attempt
        ]
        name = f"attempt {attempt}: " if len(attempts) > 1 else ""
        yield styled("[dim]{}{}[/]", name, ", ".join(parts))


def _print_call(call: SessionCall, numbers: dict[str, int], began: float) -> None:
    parent = numbers.get(call.parent_call_id or "")
    colour = _EDGE_COLOURS.get(call.edge, "default")
    heading = styled(
        f"\n[bold]{{}}[/] [{colour}]{{}}[/]{{}}  [dim]{{}}  +{{}} s[/]",
        numbers[call.call_id],
        call.edge,
        "" if parent is None else f" {parent}",
        call.call_id,
        f"{call.started_at - began:.1f}",
    )
    out.print(heading)
    if call.reason:
        doubt = " Another edge was possible." if call.ambiguous else ""
        out.print(styled("  [dim]{}: {}{}[/]", call.rule, call.reason, doubt))
    if call.prompt_reason and call.edge != "root":
        out.print(styled("  [dim]rendered by the engine: {}[/]", call.prompt_reason))
    for message in call.new_messages:
        _print_message(message)
    if call.answers:
        for choice in call.answers:
            out.print(styled("  [green]assistant[/] [dim](choice {})[/]", choice.index))
            print_choice_tokens(choice)
    elif call.answer is not None:
        _print_message(call.answer)
    out.print(styled("  [dim]{}[/]", _call_figures(call)))
    if call.status != "ok":
        error = f": {message_lines(call.error)}" if call.error else ""
        out.print(Text(f"  {call.status} (HTTP {call.http_status}){error}", "yellow"))


def _call_figures(call: SessionCall) -> str:
    cached = f" ({call.cached_tokens} cached)" if call.cached_tokens else ""
    choices = f", {call.choices} answers" if call.choices > 1 else ""
    return (
        f"prompt {call.prompt_tokens or call.input_tokens or '-'}{cached}, "
        f"sampled {call.completion_tokens or call.output_tokens or 0}, "
        f"{call.ended_at - call.started_at:.2f} s, {call.finish_reason or '-'}{choices}"
    )


def _print_message(message: StoryMessage) -> None:
    colour = _ROLE_COLOURS.get(message.role, "default")
    name = f"{message.role} {message.tool}" if message.tool else message.role
    out.print(styled(f"  [{colour}]{{}}[/]", name))
    if message.reasoning:
        _print_text(f"({message.reasoning.strip()})", style="dim")
    if message.text:
        _print_text(message.text, limit=_SYSTEM_LINES if message.role in ("system", "developer") else _SHOWN_LINES)
    for used in message.tool_calls:
        _print_text(f"-> {one_line(used.name, 80)} {_arguments(used.arguments)}", style="bold", limit=_ARGUMENT_LINES)


def _arguments(text: str) -> str:
    """Return the arguments of a tool call in readable form. `text`: the arguments as JSON.

    If the only argument is a string, such as a shell command, return the string; otherwise return `text`.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if isinstance(value, dict) and len(value) == 1 and isinstance(only := next(iter(value.values())), str):
        return only
    return text


def _print_text(text: str, *, style: str = "", limit: int = _SHOWN_LINES) -> None:
    """Print a text after a margin, without its middle lines if it is long."""
    lines = text.rstrip().split("\n")
    if len(lines) > limit + _SHOWN_END + 1:
        left_out = len(lines) - limit - _SHOWN_END
        lines = [*lines[:limit], f"[{left_out} lines left out]", *lines[-_SHOWN_END:]]
    if out.is_terminal:  # wrapped lines keep the margin
        out.print(Padding(Text("\n".join(lines), style), (0, 0, 0, _MARGIN)))
        return
    for line in lines:
        out.print(Text(" " * _MARGIN + line, style), soft_wrap=True)


def _print_legend() -> None:
    if out.is_terminal and not out.no_color:
        steps = zip(scale_legend(), _TOKEN_COLOURS, strict=True)
        out.print(Text.assemble("tokens: ", *((f"{legend}  ", colour) for legend, colour in steps)))


def _colour(logprob: float | None) -> str:
    return "dim" if logprob is None else _TOKEN_COLOURS[scale_step(logprob)]


def _token_summary(choice: CallChoice) -> str:
    known = [value for value in choice.logprobs if value is not None]
    if not known or choice.token_texts is None:
        return f"{len(choice.token_ids)} tokens without log-probabilities"
    mean = sum(known) / len(known)
    at = min(range(len(choice.logprobs)), key=lambda index: choice.logprobs[index] or 0.0)
    return (
        f"{len(choice.token_ids)} tokens, mean {mean:.3f} nats, perplexity {math.exp(-mean):.2f}; least likely: "
        f"{orjson.dumps(choice.token_texts[at]).decode()} at {at}, {format_number(choice.logprobs[at], '.2f')}"
    )


def _token_lines(choice: CallChoice) -> str:
    """Return one line for each token, as `ID:LOGPROB TEXT` with the text as JSON. If the answer has no token texts,
    return a single line with the `ID:LOGPROB` of all tokens.

    Tokens of hosted answers have no ids: their lines are `POSITION TEXT`, with the position of the token's first
    character in the answer.
    """
    if choice.token_texts is not None and not choice.token_ids:
        starts = accumulate(map(len, choice.token_texts), initial=0)
        return "\n".join(
            f"{start} {orjson.dumps(text).decode()}" for start, text in zip(starts, choice.token_texts, strict=False)
        )
    pairs: Sequence[tuple[int, float | None]] = list(zip(choice.token_ids, choice.logprobs, strict=True))
    shown = [f"{token}:{format_number(logprob, '.3f')}" for token, logprob in pairs]
    if choice.token_texts is None:
        return " ".join(shown)
    texts = (orjson.dumps(text).decode() for text in choice.token_texts)
    return "\n".join(f"{pair} {text}" for pair, text in zip(shown, texts, strict=True))
