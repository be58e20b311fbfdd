"""Text from agents and models cannot command the terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from polar_proxy.cli.output import SafeConsole, make_table, print_json

HOSTILE = "\x1b]0;title\x07 \x1b[2J \x1b]52;c;AAAA\x1b\\ \x9b31m \x08 \u202eabc\u2066 \x7f"


def printed(*things: object) -> str:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, width=200, highlight=False)
    for thing in things:
        console.print(thing)
    return file.getvalue()


@pytest.mark.parametrize(
    "thing", [HOSTILE, Text(HOSTILE), Panel(HOSTILE), make_table(("a", HOSTILE), [(1, HOSTILE)])], ids=type
)
def test_control_characters_are_shown_as_escapes(thing: object) -> None:
    text = printed(thing)
    for sequence in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\x08", "\u202e", "\u2066", "\x7f"):
        assert sequence not in text
    assert "\\x1b[2J" in text


def test_own_styles_and_line_breaks_stay() -> None:
    assert printed("[bold]a[/]\n\tb") == "\x1b[1ma\x1b[0m\n        b\n"


def test_a_live_view_still_moves_the_cursor() -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, width=80)
    with Live(Text(f"one\n{HOSTILE}"), console=console, auto_refresh=False) as live:
        live.update(Text("two\nlines"), refresh=True)
    assert "\x1b[1A" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()


def test_json_keeps_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": HOSTILE})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"text": HOSTILE}
    assert not set(shown) & set("\x1b\x07\x9b\x08\u202e\u2066\x7f")
