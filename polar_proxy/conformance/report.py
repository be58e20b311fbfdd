"""The rows as a file for programs and a page for people. A page is made from the file alone, so they never differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from polar_proxy import __version__
from polar_proxy.conformance.checks import SCENARIO_CHECKS
from polar_proxy.conformance.measure import CHECK_NAMES, HarnessRow
from polar_proxy.conformance.scenarios import SCENARIOS
from polar_proxy.types import Json

TITLES = {
    "tool_round_trip": "tool call",
    "parallel_calls": "parallel calls",
    "reasoning": "reasoning",
    "second_turn": "second turn",
    "exit_ok": "exit, good run",
    "long_run": "26 turns",
    "subagent": "sub-agent",
    "compaction": "compaction",
    "retry_429": "429",
    "retry_500": "500",
    "slow_first_byte": "slow first byte",
    "dropped_stream": "dropped stream",
    "client_killed": "client killed",
    "exit_failed": "exit, bad run",
    "evidence": "ids and log-probabilities",
    "recorded_first": "recorded before told",
    "refused": "refused requests",
    "lost": "lost",
    "doubled": "doubled",
}
MEANINGS = {
    "tool_round_trip": "what a command printed, and only running it tells, is in the next request",
    "parallel_calls": "two tool calls of one answer are both run and both outputs are in the next request",
    "reasoning": "whether the reasoning of one answer is in the messages of the next request",
    "second_turn": "the program is started again to go on; its first request is joined to the first turn",
    "exit_ok": "a run that goes well is read as such",
    "long_run": "26 model calls in a row: one `root`, all others `continues`, none of them ambiguous",
    "subagent": "the calls of a sub-agent have the edge `subagent` and a parent",
    "compaction": "the context is said to be full; the conversation after the summary has the edge `compacts`",
    "retry_429": "one 429 (with `retry-after`)",
    "retry_500": "one 500",
    "slow_first_byte": "the first token takes long",
    "dropped_stream": "the connection is reset after some bytes of the answer",
    "client_killed": "the program is killed in the middle of an answer; what was sampled is kept as `client_gone`",
    "exit_failed": "a run that the model refuses for ever is read as failed, whatever the exit status says",
    "evidence": "every answered call has an id and a log-probability for each sampled token, and its prompt's ids",
    "recorded_first": "when the last byte of an answer was handed on, its call was committed",
    "refused": "no request of the program was refused by Polar itself (4xx without a call)",
    "lost": "see above",
    "doubled": "see above",
}


def document(rows: Iterable[HarnessRow], *, engine: str, sandbox: str, slow: float, measured: str) -> Json:
    """What is written as JSON. `measured` is a date and time."""
    made = {"measured": measured, "polar": __version__, "engine": engine, "sandbox": sandbox, "slow_seconds": slow}
    harnesses = [{**asdict(row), **made} for row in rows]
    for row in harnesses:
        row["checks"] = {name: row["checks"][name] for name in CHECK_NAMES if name in row["checks"]}
    return {"schema": 1, "harnesses": harnesses}


def merged(old: Json | None, new: Json) -> Json:
    """`new` with the harnesses of `old` that it does not have; sorted by name."""
    rows = {row["name"]: row for row in (old or {}).get("harnesses", [])}
    rows |= {row["name"]: row for row in new["harnesses"]}
    return {**new, "harnesses": [rows[name] for name in sorted(rows)]}


def markdown(found: Json) -> str:
    """The page for people."""
    rows = found["harnesses"]
    lines = [_HEAD, "", "## The table", ""]
    heads = ["harness", "version", "wire API", "streamed", "calls", "lost", "doubled"]
    lines += _table(heads, ([row[key] for key in _KEYS] for row in rows))
    shown = [check for check in CHECK_NAMES if check not in ("lost", "doubled")]
    lines += [""]
    lines += _table(
        ["check", *(row["name"] for row in rows)],
        (
            [TITLES[check], *(row["checks"].get(check, {"status": "not run"})["status"] for row in rows)]
            for check in shown
        ),
    )
    lines += ["", "## What each check says", ""]
    scenarios = {scenario.name: scenario.title for scenario in SCENARIOS}
    for check in CHECK_NAMES:
        played = (
            f" (scenario: {scenarios[SCENARIO_CHECKS[check][0]]})"
            if check in SCENARIO_CHECKS
            else " (over all scenarios)"
        )
        lines.append(f"* **{TITLES[check]}**: {MEANINGS[check]}{played}")
    for row in rows:
        lines += ["", *_section(row)]
    return "\n".join(lines) + "\n"


_KEYS = ("name", "version", "dialect", "streamed", "calls", "lost", "doubled")


def _section(row: Json) -> list[str]:
    edges = ", ".join(f"{number} {edge}" for edge, number in row["edges"].items()) or "none"
    lines = [
        f"## {row['name']} {row['version']}",
        "",
        f"Measured {row['measured']} with Polar {row['polar']}, engine {row['engine']}, sandbox {row['sandbox']}, "
        f"slow first byte {row['slow_seconds']:g} s; it took {row['seconds']:.0f} s. "
        f"{row['calls']} calls; edges: {edges}.",
        "",
    ]
    lines += _table(
        ["check", "found", "detail"],
        ([TITLES[name], cell["status"], cell["detail"]] for name, cell in row["checks"].items()),
    )
    lines += [""]
    heads = ["scenario", "exit", "seconds", "requests", "calls", "joined retries", "edges", "status"]
    lines += _table(heads, (_scenario(one) for one in row["scenarios"]))
    return lines


def _scenario(one: Json) -> list[str]:
    def counts(value: Json) -> str:
        return ", ".join(f"{number} {name}" for name, number in value.items())

    exits = ", ".join("stopped" if start["exit_code"] is None else str(start["exit_code"]) for start in one["starts"])
    seconds = ", ".join(str(start["seconds"]) for start in one["starts"])
    numbers = [str(one[key]) for key in ("requests", "calls", "joined")]
    return [one["scenario"], exits or str(one["fault"]), seconds, *numbers, counts(one["edges"]), counts(one["status"])]


def _table(heads: list[str], rows: Iterable[list[Any]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return lines


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|") or "-"


_HEAD = """# Conformance: real agents through Polar

Made by `polar conformance`; do not edit. Each program, as its adapter installs it, ran in a sandbox against the real
gateway. The engine was scripted: it answers with the tool calls which that program needs, with real token ids and
log-probabilities. A TCP front between program and gateway counted what passed and broke connections where a check says
so.

* **lost**: a model answer with status 200 whose last byte was handed to the program's socket, and whose call is not in
  the database. Both halves are seen from outside Polar's pipeline.
* **doubled**: an answered call that answers the same agent turn as an earlier one of its session (the same messages and
  tools, as canonical JSON without cache marks, or the same meaning by the marks that history keeps) without being named
  a retry. A retry that was joined to the first call has no call of its own.

Cells: `ok`; `failed`; `n/a`, the program cannot have it; `gives up`, the program itself ends its run there and Polar
recorded that rightly; `not run`, it could not be measured. The details stand in the section of each program."""
