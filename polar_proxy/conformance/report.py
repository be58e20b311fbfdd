"""The measured rows as a JSON file and as a Markdown page. The page is made from the file, so they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import orjson

from polar_proxy import __version__
from polar_proxy.conformance.checks import SCENARIO_CHECKS
from polar_proxy.conformance.measure import CHECK_NAMES, HarnessRow
from polar_proxy.conformance.scripted_model import SCENARIOS
from polar_proxy.types import EngineInfo, Json

DESCRIPTIONS = {
    "tool_round_trip": ("tool call", "the next request contains the output of a command that was really run"),
    "parallel_calls": (
        "parallel calls",
        "two tool calls of one answer are both run, and both outputs are in the next request",
    ),
    "reasoning": ("reasoning", "whether the reasoning of one answer is in the messages of the next request"),
    "second_turn": (
        "second turn",
        "the program is started again to continue; its first request is joined to the first turn",
    ),
    "exit_ok": ("exit, good run", "a run that succeeds counts as such"),
    "long_run": ("26 turns", "26 model calls in a row: one `root`, all others `continues`, none of them ambiguous"),
    "subagent": ("sub-agent", "the calls of a sub-agent have the edge `subagent` and a parent"),
    "compaction": (
        "compaction",
        "the context is reported as full; the conversation after the summary has the edge `compacts`",
    ),
    "retry_429": ("429", "one 429 (with `retry-after`)"),
    "retry_500": ("500", "one 500"),
    "slow_first_byte": ("slow first byte", "the first token takes long"),
    "dropped_stream": ("dropped stream", "the connection is reset after some bytes of the answer"),
    "client_killed": (
        "client killed",
        "the program is killed in the middle of an answer; the sampled tokens are kept as `client_gone`",
    ),
    "exit_failed": (
        "exit, bad run",
        "a run whose every request is refused counts as failed, whatever its exit status is",
    ),
    "evidence": (
        "ids and log-probabilities",
        "every answered call has its prompt's ids, and an id and a log-probability for each sampled token",
    ),
    "recorded_first": (
        "recorded before sent",
        "when the last byte of an answer was handed on, its call was committed",
    ),
    "refused": ("refused requests", "no request of the program was refused by Polar itself (4xx without a call)"),
    "lost": ("lost", "see above"),
    "doubled": ("doubled", "see above"),
}
"""Name of a check -> its title and its meaning."""


def document(rows: Iterable[HarnessRow], *, engine: EngineInfo, sandbox: str, slow: float) -> Json:
    """Return the rows as they are written to the JSON file."""
    measured = {
        "measured": now(),
        "polar": __version__,
        "engine": engine_name(engine),
        "sandbox": sandbox,
        "slow_seconds": slow,
    }
    harnesses = [{**asdict(row), **measured} for row in rows]
    for row in harnesses:
        row["checks"] = {name: row["checks"][name] for name in CHECK_NAMES if name in row["checks"]}
    return {"schema": 1, "harnesses": harnesses}


def merged(old: Json | None, new: Json) -> Json:
    """Return `new` plus the harnesses that only `old` has, sorted by name."""
    rows = {row["name"]: row for row in (old or {}).get("harnesses", [])}
    rows |= {row["name"]: row for row in new["harnesses"]}
    return {**new, "harnesses": [rows[name] for name in sorted(rows)]}


def is_good(row: Json) -> bool:
    """Return whether no check of a row failed and no call was lost or doubled."""
    failed = any(cell["status"] == "failed" for cell in row["checks"].values())
    return not (failed or row["lost"] or row["doubled"])


def save(folder: Path, new: Json) -> None:
    """Write conformance.json and conformance.md. Harnesses that were not run keep the rows they have there."""
    write_report(folder, "conformance", new, merged, markdown)


def markdown(document: Json) -> str:
    rows = document["harnesses"]
    lines = [_HEAD, "", "## The table", ""]
    heads = ["harness", "version", "wire API", "streamed", "calls", "lost", "doubled"]
    keys = ("name", "version", "dialect", "streamed", "calls", "lost", "doubled")
    lines += markdown_table(heads, ([row[key] for key in keys] for row in rows))
    shown = [name for name in CHECK_NAMES if name not in ("lost", "doubled")]
    statuses = ([row["checks"].get(name, {"status": "not run"})["status"] for row in rows] for name in shown)
    titles = [DESCRIPTIONS[name][0] for name in shown]
    lines += ["", *markdown_table(["check", *(row["name"] for row in rows)], map(_prepend, titles, statuses))]
    lines += ["", "## What each check means", ""]
    scenarios = {scenario.name: scenario.title for scenario in SCENARIOS}
    for name in CHECK_NAMES:
        title, meaning = DESCRIPTIONS[name]
        scope = f"scenario: {scenarios[SCENARIO_CHECKS[name][0]]}" if name in SCENARIO_CHECKS else "over all scenarios"
        lines.append(f"* **{title}**: {meaning} ({scope})")
    for row in rows:
        lines += ["", *_section(row)]
    return "\n".join(lines) + "\n"


def _prepend(title: str, cells: list[str]) -> list[str]:
    return [title, *cells]


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
    cells = ([DESCRIPTIONS[name][0], cell["status"], cell["detail"]] for name, cell in row["checks"].items())
    lines += [*markdown_table(["check", "result", "detail"], cells), ""]
    heads = ["scenario", "exit", "seconds", "requests", "calls", "joined retries", "edges", "status"]
    return lines + markdown_table(heads, map(_scenario_cells, row["scenarios"]))


def _scenario_cells(run: Json) -> list[object]:
    def counts(value: Json) -> str:
        return ", ".join(f"{number} {name}" for name, number in value.items())

    exits = ", ".join("stopped" if start["exit_code"] is None else str(start["exit_code"]) for start in run["starts"])
    seconds = ", ".join(str(start["seconds"]) for start in run["starts"])
    numbers = [run[key] for key in ("requests", "calls", "joined")]
    return [run["scenario"], exits or run["fault"], seconds, *numbers, counts(run["edges"]), counts(run["status"])]


# Shared with the fidelity report


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def engine_name(info: EngineInfo) -> str:
    return info.engine if info.engine == "scripted" else f"{info.engine} {info.version}, {info.model}"


def write_report(
    folder: Path, name: str, new: Json, merge: Callable[[Json | None, Json], Json], page: Callable[[Json], str]
) -> None:
    """Merge `new` into `name`.json in a folder, and write `name`.md from the result."""
    path = folder / f"{name}.json"
    old = orjson.loads(path.read_bytes()) if path.is_file() else None
    document = merge(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    (folder / f"{name}.md").write_text(page(document))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|") or "-"


_HEAD = """# Conformance: real agents through Polar

Made by `polar conformance`; do not edit. Each program, as its adapter installs it, ran in a sandbox against the real
gateway. The engine was scripted: it answers with the tool calls that the program needs, with real token ids and
log-probabilities. A TCP proxy between program and gateway recorded what passed, and broke connections where a check
needs that.

* **lost**: a model answer with status 200 whose last byte was handed to the program's socket, and whose call is not in
  the database. Both halves are seen from outside Polar's pipeline.
* **doubled**: an answered call with the same request as an earlier one of its session (the same messages and tools, as
  canonical JSON without cache marks, or the same stored fingerprint) that is not marked as a retry. A retry that was
  joined to the first call is not recorded as a separate call.

Results: `ok`; `failed`; `n/a`, the program cannot have it; `gives up`, the program itself ends its run there and Polar
recorded that correctly; `not run`, it could not be measured. The section of each program has the details."""
