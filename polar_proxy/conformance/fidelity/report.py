"""The fidelity rows as a JSON file and as a Markdown page. The page is made from the file, so they agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polar_proxy import __version__
from polar_proxy.conformance.fidelity.measure import FidelityRow
from polar_proxy.conformance.fidelity.play import MODES, TEMPLATES
from polar_proxy.conformance.report import engine_name, markdown_table, now, write_report
from polar_proxy.traces.drift import CAUSE_MEANINGS
from polar_proxy.types import EngineInfo, Json

_SHOWN_DIFFERENCES = 3


def document(rows: Iterable[FidelityRow], *, engine: EngineInfo, sandbox: str, cut_every: int) -> Json:
    """Return the rows as they are written to the JSON file."""
    measured = {
        "measured": now(),
        "polar": __version__,
        "engine": engine_name(engine),
        "sandbox": sandbox,
        "cut_every": cut_every,
    }
    return {"schema": 1, "rows": [{**asdict(row), "adds_up": row.adds_up, **measured} for row in rows]}


def merged(old: Json | None, new: Json) -> Json:
    """Return `new` plus the rows that only `old` has, in the order of the tables."""
    rows = {_key(row): row for row in (old or {}).get("rows", [])}
    rows |= {_key(row): row for row in new["rows"]}
    return {**new, "rows": [rows[key] for key in sorted(rows)]}


def _key(row: Mapping[str, Any]) -> tuple[int, str, int]:
    return list(TEMPLATES).index(row["template"]), row["harness"], MODES.index(row["mode"])


def is_good(document: Json) -> bool:
    """Return whether every run was possible, all counts add up, and in continue mode no sequence is split by drift."""
    return all(
        row["fault"] is None and row["adds_up"] and not (row["mode"] == "continue" and row["drifted"])
        for row in document["rows"]
    )


def save(folder: Path, new: Json) -> None:
    """Write fidelity.json and fidelity.md. Runs that were not repeated keep the rows they have there."""
    write_report(folder, "fidelity", new, merged, markdown)


def markdown(document: Json) -> str:
    lines = [_HEAD]
    for template in TEMPLATES:
        rows = [row for row in document["rows"] if row["template"] == template]
        if rows:
            lines += ["", f"## {_TITLES[template]}", "", *_comparison(rows)]
    rows = document["rows"]
    lines += ["", "## The token counts of every run", "", _COUNTS, "", *_token_counts(rows)]
    lines += ["", "## Why prompts drifted", "", *_causes(rows)]
    lines += ["", "## Why calls were not continued", "", *_reasons(rows)]
    lines += ["", "## Where prompts left the sampled tokens", "", _EXAMPLES, *_examples(rows)]
    return "\n".join(lines) + "\n"


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


def _counts(value: Mapping[str, int], between: str = " ") -> str:
    return ", ".join(f"{number}{between}{name}" for name, number in value.items()) or "-"


_TITLES = {
    "keeps": "A template that shows the reasoning of every turn",
    "strips": "A template that shows only the reasoning after the last message of a user",
}

_HEAD = """# Fidelity: are the trained tokens those that were sampled?

Made by `polar conformance --fidelity` (`scripts/fidelity.sh` starts the server that it needs); do not edit.

Real agent programs ran against the real gateway and a real vLLM: its template, tokenizer, parsers, prompts and
log-probabilities. Only the choice of tokens was forced, by a plugin in the server, so that every run has the same
awkward answers: JSON with odd spaces, escapes, key order and numbers, booleans, empty and nested arguments, two calls
at once, a tool that does not exist, 30 kB of output, long answers, reasoning, text before calls, a second turn of the
user if the program can continue. About once in 40 characters an answer is cut into other tokens than the tokenizer's
own, as a policy at temperature 1 samples them. So `render` has as much drift here as it can have; how much your policy
has depends on how it writes.

* **calls**: model calls of the run (render / continue, if the two differ).
* **calls that continue an answer**: calls whose conversation extends a recorded answer by meaning.
* **splits by drift**: such calls whose prompt does not begin with the tokens of a trained answer, although nothing was
  changed on purpose (`polar_proxy/traces/drift.py`). Each ends a training sequence and begins another one.
* **traces**: sequences that the builder `merged` makes of the run.

With your own model and harness: `polar doctor drift --harness H --engine vllm --engine-url URL` shows the first token
that differs, names the cause and the remedy."""

_COUNTS = """Every sampled token is trained, or excluded with a reason. The largest difference, in nats, is that between
the log-probabilities recorded for the longest merged sequence and those of a fresh teacher-forced pass over it."""

_PAIRS = """`retokenised +`: the first tokens that differ have the same text; later the texts differ too. Other pairs:
both causes together explain the difference."""

_EXAMPLES = """The first differences of each run: text before, then token by token (`¦` between tokens)."""
