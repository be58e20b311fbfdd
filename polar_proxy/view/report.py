"""A run as one HTML file that needs no server: the page of the run, each call of its tree, and its tokens in colour.

The file has no scripts and no links, and loads nothing. The secrets that `store.secrets` knows are removed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version

from markupsafe import Markup

from polar_proxy.api import ApiContext
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.store.secrets import without_secrets
from polar_proxy.token_scale import scale_step
from polar_proxy.types import Json
from polar_proxy.view.access import PageAccess
from polar_proxy.view.context import ViewContext
from polar_proxy.view.pages.run import call_values, rollout_values, session_values
from polar_proxy.view.templates import ASSETS, render_text
from polar_proxy.view.token_source import CHUNK, TokenSequence

_MOST_TOKENS = 100_000
"""Maximum number of tokens of a trace that are shown. Browsers open files with more tokens slowly."""
_LINK = re.compile(r' href="/[^"]*"| href="\?[^"]*"')


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens with one colour: one sampled token, or any number of context tokens."""

    text: str
    kind: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class ReportTrace:
    """The tokens of a trace. `problem`: why their texts are missing, or how many tokens are left out."""

    title: str
    runs: list[TokenRun]
    problem: str | None


async def make_report(store: Store, settings: Settings, name: str) -> str:
    """Return the HTML of a rollout or session, named as in `polar show`. Raises UsageError for a call."""
    found = await store.names.find(name)
    if found.kind == "call":
        raise UsageError(f"{name} is a call. Name a rollout or a session instead.")
    view = ViewContext(ApiContext(store, settings), PageAccess(store, open_on_loopback=True), writable=False)
    read = rollout_values if found.kind == "rollout" else session_values
    values = await read(view, found.record_id, all_calls=True)
    page = await render_text(
        "run.html",
        **values
        | {"base": "report_base.html", "is_report": True, "is_live": False, "writable": False, "may_write": False},
        path="",
        styles=Markup((ASSETS / "polar.css").read_text()),
        version=version("polar-proxy"),
        location=store.location,
        report_calls=await _read_calls(view, values),
        report_tokens=[
            await _read_tokens(view, trace.trace_id) for trace in values["traces"] if trace.builder == "merged"
        ],
    )
    # Texts are escaped, so a quoted attribute is always one of the templates.
    return await asyncio.to_thread(without_secrets, _LINK.sub("", page))


async def _read_calls(view: ViewContext, values: Json) -> list[Json]:
    """Return the template values of each call, without the messages that it shares with earlier calls."""
    calls = [row.call for row in values["tree"].rows]
    found = [await call_values(view, calls, call.call_id) for call in calls]
    return [one | {"shown": replace(one["shown"], earlier=(), left_out=0, raw=None, raw_tools=None)} for one in found]


async def _read_tokens(view: ViewContext, trace_id: str) -> ReportTrace:
    sequence = await view.tokens.of_trace(view.store, trace_id)
    runs: list[TokenRun] = []
    problem = None
    for start in range(0, min(len(sequence.token_ids), _MOST_TOKENS), CHUNK):
        chunk = await view.tokens.chunk(view.api, sequence, start)
        problem = problem or chunk.get("problem")
        runs += _runs(chunk)
    if len(sequence.token_ids) > _MOST_TOKENS:
        problem = f"The first {_MOST_TOKENS} of {len(sequence.token_ids)} tokens are shown."
    return ReportTrace(_title(sequence), runs, problem)


def _title(sequence: TokenSequence) -> str:
    return f"{sequence.title}: {len(sequence.token_ids)} tokens, grade {sequence.facts['grade']}"


def _runs(chunk: Json) -> Iterator[TokenRun]:
    context: list[str] = []
    for token_id, logprob in zip(chunk["ids"], chunk["logprobs"], strict=True):
        text = chunk["texts"].get(str(token_id), f"⟨{token_id}⟩")
        if logprob is None:
            context.append(text)
            continue
        if context:
            yield TokenRun("".join(context), "c")
            context = []
        yield TokenRun(text, f"s p{scale_step(logprob)}", f"{token_id}, log-probability {logprob}")
    if context:
        yield TokenRun("".join(context), "c")
