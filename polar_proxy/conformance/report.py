"""The two reports. Each is a JSON file and a Markdown page; the page is made from the JSON file, so that both agree.

CONFORMANCE has a row for each harness. FIDELITY has a row for each harness, chat template and prompt mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from polar_proxy import __version__
from polar_proxy.conformance.checks import CHECKS
from polar_proxy.conformance.scripted_model import SCENARIOS
from polar_proxy.traces.drift import CAUSE_MEANINGS
from polar_proxy.types import EngineInfo, Json

_SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class MeasurementReport:
    """One kind of report: makes JSON documents of measured rows, merges them, and saves them as JSON and Markdown."""

    name: str
    """Name of the report's two files, without .json and .md."""
    rows: str
    """The field of the JSON document that holds the rows."""
    key: Callable[[Json], Any]
    """Returns the key that identifies a row; rows are sorted by this key."""
    is_good_row: Callable[[Json], bool]
    page: Callable[[Sequence[Json]], list[str]]
    """Makes the lines of the Markdown page from the rows."""

    def document(self, rows: Iterable[Json], *, engine: EngineInfo, sandbox: str, **more: float) -> Json:
        """Return the rows as a JSON document. Each row gets the time, the engine and the sandbox of its measurement,
        and the version of Polar."""
        measured = {
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "polar": __version__,
            "engine": engine.engine,
            "sandbox": sandbox,
        }
        if engine.engine != "scripted":
            measured["engine"] += f" {engine.version}, {engine.model}"
        return {"schema": 1, self.rows: [{**row, **measured, **more} for row in rows]}

    def merged(self, old: Json | None, new: Json) -> Json:
        """Return `new` plus the rows that only `old` has, sorted."""
        rows = {self.key(row): row for document in (old or {}, new) for row in document.get(self.rows, ())}
        return {**new, self.rows: [rows[key] for key in sorted(rows)]}

    def is_good(self, document: Json) -> bool:
        return all(map(self.is_good_row, document[self.rows]))

    def markdown(self, document: Json) -> str:
        return "\n".join(self.page(document[self.rows])) + "\n"

    def save(self, folder: Path, new: Json) -> None:
        """Write both files. Rows of the existing JSON file that were not measured again are kept."""
        path = folder / f"{self.name}.json"
        document = self.merged(orjson.loads(path.read_bytes()) if path.is_file() else None, new)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
        path.with_suffix(".md").write_text(self.markdown(document))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|") or "-"


def _counts(value: Mapping[str, int], between: str = " ") -> str:
    return ", ".join(f"{number}{between}{name}" for name, number in value.items())


# Conformance


def _conformance_page(rows: Sequence[Json]) -> list[str]:
    lines = [_CONFORMANCE_HEAD, "", "## The table", ""]
    heads = ["harness", "version", "wire API", "streamed", "calls", "lost", "doubled"]
    keys = ("name", "version", "dialect", "streamed", "calls", "lost", "doubled")
    lines += markdown_table(heads, ([row[key] for key in keys] for row in rows))
    results = (
        [check.title, *(row["checks"].get(name, {"status": "not run"})["status"] for row in rows)]
        for name, check in CHECKS.items()
        if name not in ("lost", "doubled")
    )
    lines += ["", *markdown_table(["check", *(row["name"] for row in rows)], results)]
    lines += ["", "## What each check means", ""]
    scenarios = {scenario.name: scenario.title for scenario in SCENARIOS}
    for check in CHECKS.values():
        scope = f"scenario: {scenarios[check.scenario]}" if check.scenario else "over all scenarios"
        lines.append(f"* **{check.title}**: {check.meaning} ({scope})")
    for row in rows:
        lines += ["", *_section(row)]
    return lines


def _section(row: Json) -> list[str]:
    lines = [
        f"## {row['name']} {row['version']}",
        "",
        f"Measured {row['measured']} with Polar {row['polar']}, engine {row['engine']}, sandbox {row['sandbox']}, "
        f"slow first byte {row['slow_seconds']:g} s; it took {row['seconds']:.0f} s. "
        f"{row['calls']} calls; edges: {_counts(row['edges']) or 'none'}.",
        "",
    ]
    cells = ([CHECKS[name].title, cell["status"], cell["detail"]] for name, cell in row["checks"].items())
    lines += [*markdown_table(["check", "result", "detail"], cells), ""]
    heads = ["scenario", "exit", "seconds", "requests", "calls", "joined retries", "edges", "status"]
    return lines + markdown_table(heads, map(_scenario_cells, row["scenarios"]))


def _scenario_cells(run: Json) -> list[object]:
    exits = ", ".join("stopped" if start["exit_code"] is None else str(start["exit_code"]) for start in run["starts"])
    seconds = ", ".join(str(start["seconds"]) for start in run["starts"])
    numbers = [run[key] for key in ("requests", "calls", "joined")]
    return [run["scenario"], exits or run["fault"], seconds, *numbers, _counts(run["edges"]), _counts(run["status"])]


def _is_good_harness(row: Json) -> bool:
    """Return whether no check failed and no call was lost or recorded twice."""
    failed = any(cell["status"] == "failed" for cell in row["checks"].values())
    return not (failed or row["lost"] or row["doubled"])


# Fidelity


def _fidelity_page(rows: Sequence[Json]) -> list[str]:
    lines = [_FIDELITY_HEAD]
    for template in dict.fromkeys(row["template"] for row in rows):
        title = TEMPLATE_TITLES.get(template, f"The chat template and the parsers of {template}")
        shown = [row for row in rows if row["template"] == template]
        lines += ["", f"## {title}", "", *_comparison(shown)]
    lines += ["", "## The token counts of every run", "", _COUNTS, "", *_token_counts(rows)]
    lines += ["", "## Why prompts drifted", "", *_causes(rows)]
    lines += ["", "## Why calls were not continued", "", *_reasons(rows)]
    return [*lines, "", "## Where prompts left the sampled tokens", "", _EXAMPLES, *_examples(rows)]


def _place(template: str) -> tuple[int, str]:
    """Return the sort key of a template. The templates in TEMPLATE_TITLES come first, in that order. All others follow,
    ordered by name."""
    known = list(TEMPLATE_TITLES)
    return (known.index(template), "") if template in known else (len(known), template)


def _is_faithful(row: Json) -> bool:
    """Return whether the harness ran, all counts add up and, in continue mode, drift split no sequence."""
    return row["fault"] is None and row["adds_up"] and not (row["mode"] == "continue" and row["drifted"])


def _comparison(rows: Sequence[Json]) -> list[str]:
    heads = ["harness", "version", "wire API", "calls", "calls that continue an answer"]
    heads += ["splits by drift, render", "splits by drift, continue", "traces, render", "traces, continue"]
    modes = ("render", "continue")
    by_mode = {(row["harness"], row["mode"]): row for row in rows}
    cells = []
    for name in sorted({row["harness"] for row in rows}):
        pair = [by_mode.get((name, mode)) for mode in modes]
        measured = next(row for row in reversed(pair) if row is not None)
        both = [[_number(row, key) for row in pair] for key in ("calls", "bases", "drifted", "traces")]
        calls, bases = (" / ".join(dict.fromkeys(values)) for values in both[:2])
        cells.append([name, measured["version"], measured["dialect"], calls, bases, *both[2], *both[3]])
    totals = [sum(row["drifted"] for row in rows if row["mode"] == mode and not row["fault"]) for mode in modes]
    cells.append(["**all**", "", "", "", "", *(f"**{total}**" for total in totals), "", ""])
    return markdown_table(heads, cells)


def _number(row: Json | None, key: str) -> str:
    return "not run" if row is None or row["fault"] else str(row[key])


def _token_counts(rows: Sequence[Json]) -> list[str]:
    heads = ["harness", "template", "mode", "ended", "recorded", "trained", "excluded", "adds up", "largest difference"]

    def cells(row: Json) -> list[object]:
        ended = row["fault"] or row["detail"] or ", ".join(row["outcomes"])
        largest = "-" if row["largest"] is None else f"{row['largest']:.1e} ({row['scored']} tokens)"
        counts = [row["recorded"], row["trained"], _counts(row["excluded"]), "yes" if row["adds_up"] else "NO"]
        return [row["harness"], row["template"], row["mode"], ended, *counts, largest]

    return markdown_table(heads, map(cells, rows))


def _causes(rows: Sequence[Json]) -> list[str]:
    lines = [f"* **{name}**: {text}" for name, text in CAUSE_MEANINGS.items()]
    heads = ["harness", "template", "mode", "splits by drift", "of these, by cause"]
    cells = (
        [row["harness"], row["template"], row["mode"], row["drifted"], _counts(row["causes"], " x ")]
        for row in rows
        if row["drifted"]
    )
    return [*lines, "", _PAIRS, "", *markdown_table(heads, cells)]


def _reasons(rows: Sequence[Json]) -> list[str]:
    heads = ["harness", "template", "calls", "continued", "not continued, by reason", "edges"]

    def cells(row: Json) -> list[object]:
        counts = [row["calls"], row["continued"], _counts(row["reasons"]), _counts(row["edges"])]
        return [row["harness"], row["template"], *counts]

    return markdown_table(heads, (cells(row) for row in rows if row["mode"] == "continue"))


def _examples(rows: Sequence[Json]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        for difference in row["differences"][:_SHOWN_DIFFERENCES] if row["template"] == "keeps" else ():
            cause = " + ".join(difference["causes"])
            lines += ["", f"* {row['harness']}, {row['mode']}, token {difference['position']} ({cause}), after"]
            lines += [f"  `{_code(difference['before'])}`", f"  * sampled: `{_tokens(difference['sampled'])}`"]
            lines += [f"  * rendered: `{_tokens(difference['rendered'])}`"]
    return lines


def _tokens(texts: Sequence[str]) -> str:
    return _code(" ¦ ".join(texts))


def _code(text: str) -> str:
    return text.replace("\n", "⏎").replace("`", "'").replace("\t", "⇥")


_CONFORMANCE_HEAD = """# Conformance: real agents through Polar

Made by `polar conformance`; do not edit. Each program, as its adapter installs it, ran in a sandbox against the real
gateway. The engine was scripted: it answers with the tool calls that the program needs, with real token ids and
log-probabilities. A TCP proxy between program and gateway recorded what passed, and broke connections where a check
needs that.

* **lost**: a model answer with status 200 whose last byte was handed to the program's socket, and whose call is not in
  the database. The answer is seen by a proxy and the call is read from the database, both outside Polar's pipeline.
* **doubled**: an answered call with the same request as an earlier one of the session (the same messages and tools, as
  canonical JSON without cache marks, or the same stored fingerprint) that is not marked as a retry. A retry that was
  joined to the first call is not recorded as a separate call.

Results: `ok`; `failed`; `n/a`, it does not apply to the program; `gives up`, the program itself ends its run there;
`not run`, it could not be measured. The section of each program has the details."""

TEMPLATE_TITLES = {
    "keeps": "A template that shows the reasoning of every turn",
    "strips": "A template that shows only the reasoning after the last message of a user",
}
"""Titles of the chat templates of `polar conformance`, in the order of the fidelity page. The templates of model
families come after them, ordered by name."""

_FIDELITY_HEAD = """# Fidelity: are the trained tokens those that were sampled?

Made by `polar conformance --fidelity` (`scripts/fidelity.sh` starts the server that it needs); do not edit.

Real agent programs ran against the real gateway and a real vLLM: its template, tokenizer, parsers, prompts and
log-probabilities. Only the choice of tokens was forced, by a plugin in the server, so that every run has the same
awkward answers: JSON with odd spaces, escapes, key order and numbers, booleans, empty and nested arguments, two tool
calls at once, a tool that does not exist, 30 kB of output, long answers, reasoning, text before tool calls, a second
turn of the user if the program can continue. About once in 40 characters an answer is cut into other tokens than the
tokenizer's own, as a policy at temperature 1 samples them. So `render` has as much drift here as it can have; how much
your policy has depends on how it writes.

* **calls**: model calls of the run (render / continue, if the two differ).
* **calls that continue an answer**: calls whose messages extend a recorded answer, whatever their tokens.
* **splits by drift**: such calls whose prompt does not begin with the tokens of a trained answer, although nothing was
  changed on purpose (`polar_proxy/traces/drift.py`). Each ends a training sequence and begins another one.
* **traces**: sequences that the builder `merged` makes of the run.

With your own model and harness: `polar doctor drift --harness H --engine vllm --engine-url URL` shows the first token
that differs, names the cause and the remedy."""

_COUNTS = """Every sampled token is trained, or excluded with a reason. The largest difference, in nats, is between the
log-probabilities recorded for the sequence with the most trained tokens and those of a fresh teacher-forced pass."""

_PAIRS = """`retokenised +`: the first tokens that differ have the same text; later the texts differ too. Other pairs:
both causes together explain the difference."""

_EXAMPLES = """The first differences of each run: text before, then token by token (`¦` between tokens)."""

CONFORMANCE = MeasurementReport(
    "conformance", "harnesses", lambda row: row["name"], _is_good_harness, _conformance_page
)
FIDELITY = MeasurementReport(
    "fidelity",
    "rows",
    lambda row: (*_place(row["template"]), row["harness"], row["mode"]),
    _is_faithful,
    _fidelity_page,
)
