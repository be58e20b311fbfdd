"""Jinja2 templates of the pages. Everything is escaped, and control characters are shown as escapes.

Names, texts and tool results come from models and agents. A value reaches a page only through `_shown`, which shows
characters that would reorder or hide text, and through Jinja's escaping, which is on for every template.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from polar_proxy.terminal import escape_controls

ASSETS = Path(__file__).parent / "assets"
_LONGEST_SECONDS = 1e12
_FOLDER = Path(__file__).parent / "templates"


def _shown(value: Any) -> Any:
    if value is None:
        return ""
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _number(value: Any) -> str:
    """Return an integer with separated thousands, another number with four significant digits, or `–` for None.

    A client's JSON may have a value that is not a number. Such a value is returned as text."""
    if value is None:
        return "–"
    if isinstance(value, int | np.integer):
        return f"{int(value):,}"
    if not isinstance(value, float | np.floating):
        return str(value)
    return f"{int(value):,}" if float(value).is_integer() else f"{float(value):.4g}"


def _listed(value: Any) -> list[Any]:
    """Return a value of a client's JSON if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def _duration(seconds: Any) -> str:
    if seconds is None:
        return "–"
    if not isinstance(seconds, int | float) or not abs(seconds) < _LONGEST_SECONDS:
        return str(seconds)
    seconds = float(seconds)
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _time(at: float | None) -> Markup:
    """Return the time in UTC. The page's script shows it in the reader's time zone."""
    if at is None:
        return Markup("–")
    moment = time.gmtime(at)
    machine, shown = time.strftime("%Y-%m-%dT%H:%M:%SZ", moment), time.strftime("%Y-%m-%d %H:%M:%S", moment)
    return Markup('<time datetime="{}">{}</time>').format(machine, shown)


def _short(name: str | None) -> str:
    """Return an id without its middle. Its last characters are kept, because ids made at the same time differ there."""
    kind, separator, rest = (name or "–").partition("_")
    return f"{kind}_{rest[:4]}…{rest[-4:]}" if separator and len(rest) > 12 else (name or "–")


def _url(name: str | None) -> str:
    return quote(name or "", safe="")


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()


_environment = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {
    "number": _number,
    "listed": _listed,
    "bytes": _bytes,
    "duration": _duration,
    "time": _time,
    "short": _short,
    "url": _url,
    "json": _json,
}


_environment.globals["base"] = "base.html"


async def render(name: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """Return the page that a template makes, as a response."""
    return HTMLResponse(await render_text(name, **values), status_code=status)


async def render_text(name: str, **values: Any) -> str:
    """Return the text of a template, rendered in a thread because some pages are large."""
    return await asyncio.to_thread(_environment.get_template(name).render, **values)
