"""The runner of other projects' suites: its list, its reports and its engine. The suites themselves need packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polar_proxy.types import ChatRequest, Message
from tests.foreign.obliging_engine import oblige
from tests.foreign.run import SuiteResult, read_report, read_suites, table

REPORT = """<testsuites><testsuite>
<testcase name="good"/><testcase name="left out"><skipped message="no model"/></testcase>
<testcase name="bad"><failure message="first line\nsecond line"/></testcase>
<testcase name="worse"><error>broken</error></testcase>
</testsuite></testsuites>"""
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("one", "two")
)


def test_every_suite_has_its_program_and_pinned_packages() -> None:
    for suite in read_suites():
        assert (Path(__file__).parent / "suites" / suite.program).exists()
        for package in suite.packages:
            assert re.search(r"(==|.@)\d+\.\d+\.\d+$", package), package


def test_report_becomes_a_table_with_the_failures(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    result = read_report(SuiteResult("suite", "a@1.0.0"), report)
    assert (result.passed, result.total, result.skipped) == (1, 3, {"no model": 1})
    found = table([result])
    assert "| suite | 1 | 3 | 1 | a@1.0.0 |" in found
    assert "* suite, `bad`: first line" in found
    assert "* suite, `worse`: broken" in found
    assert "* suite, 1: no model" in found


@pytest.mark.parametrize(
    ("choice", "names"),
    [("none", []), ("auto", ["one"]), ({"type": "function", "function": {"name": "two"}}, ["two"])],
)
def test_engine_obeys_the_tool_choice(choice: object, names: list[str]) -> None:
    request = ChatRequest("m", (Message("user", "hi"),), tools=TOOLS, tool_choice=choice)  # type: ignore[arg-type]
    answer = oblige(request)
    assert [call.name for call in getattr(answer, "calls", ())] == names


def test_engine_fills_in_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/name"}, "ages": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "ages"],
        "$defs": {"name": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = oblige(ChatRequest("m", (Message("user", "'Ada' is 36"),), response_format=form))
    assert getattr(answer, "text", "") == '{"name": "Ada", "ages": [36]}'
