"""Text from agents and models cannot command the terminal."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
from rich.console import ConsoleDimensions
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from polar_proxy.cli import sql
from polar_proxy.cli.output import SafeConsole, make_table, print_json, styled
from polar_proxy.terminal import SafeLogFormatter, one_line

HOSTILE = "\x1b]0;title\x07 \x1b[2J \x1b]52;c;AAAA\x1b\\ \x9b31m \x08 \u202eabc\u2066 \x7f"

CONTROLS = set("\x1b\x07\x9b\x08\u202e\u2066\x7f")


def printed(*things: object) -> str:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, width=200)
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
    assert printed(styled("[bold]a[/]\n\tb")) == "\x1b[1ma\x1b[0m\n        b\n"


def test_markup_from_outside_is_text() -> None:
    """Otherwise `[link=...]` would make a link and `[/]` end the program."""
    word = "[link=https://evil.example]click[/link] [/] {} [conceal]x"
    assert printed(word) == f"{word}\n"
    assert printed(styled("[bold]{}[/] {}", word, "b")) == f"\x1b[1m{word}\x1b[0m b\n"
    assert word in printed(make_table(("a",), [(word,)]))


def test_a_table_has_all_columns_however_narrow_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, width=40)
    monkeypatch.setattr(SafeConsole, "size", ConsoleDimensions(40, 25))
    console.print(make_table(("session", "n", "text"), [("s" * 30, 7, "word " * 9), ("t" * 30, 8, "")], wrap=("text",)))
    assert [line.split()[:2] for line in file.getvalue().splitlines()[:2]] == [["session", "n"], ["s" * 30, "7"]]
    monkeypatch.setattr(sql, "out", console)
    sql._print_rows(["session", "n", "text"], [["s" * 20, 7, "word " * 9]])
    assert [line.split()[0] for line in file.getvalue().splitlines()[-4:]] == ["session", "n", "text", "word"]


def test_a_table_leaves_out_optional_columns_without_values() -> None:
    rows = [(1, None, None), (2, None, 0)]
    assert printed(make_table(("a", "b", "c"), rows, optional=("b", "c"))).split()[-4:] == ["1", "-", "2", "0"]


def test_a_field_is_one_line_of_bounded_length() -> None:
    assert printed(styled("reason {}", "a\nsolved 1\tof 1")) == "reason a\\nsolved 1\\tof 1\n"
    assert len(one_line("x" * 10_000)) < 600


def test_log_lines_and_tracebacks_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    formatter = SafeLogFormatter("%(message)s")
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "failed: %s", (f"{HOSTILE}\nerror: forged",), sys.exc_info()
        )
    shown = formatter.format(record)
    assert not set(shown) & CONTROLS
    assert [line for line in shown.splitlines() if not line.startswith("  ")] == [shown.splitlines()[0]]


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
    assert not set(shown) & CONTROLS
