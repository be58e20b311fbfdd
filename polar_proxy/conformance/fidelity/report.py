"""The rows as a file for programs and a page for people. The page is made from the file alone, so they never differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from polar_proxy import __version__
from polar_proxy.conformance.fidelity.measure import FidelityRow
from polar_proxy.conformance.fidelity.play import MODES, TEMPLATES
from polar_proxy.traces.drift_causes import CAUSE_MEANINGS
from polar_proxy.types import Json

_SHOWN_DIFFERENCES = 3


def document(rows: Iterable[FidelityRow], *, engine: str, sandbox: str, cut_every: int, measured: str) -> Json:
    """What is written as JSON. `measured` is a date and time."""
    made = {
        "measured": measured,
        "polar": __version__,
        "engine": engine,
        "sandbox": sandbox,
        "cut_every": cut_every,
    }
    return {"schema": 1, "rows": [{**asdict(row), "adds_up": row.adds_up, **made} for row in rows]}


def merged(old: Json | None, new: Json) -> Json:
    """`new` with the rows of `old` that it does not have, in the order of the tables."""
    rows = {_key(row): row for row in (old or {}).get("rows", [])}
    rows |= {_key(row): row for row in new["rows"]}
    return {**new, "rows": [rows[key] for key in sorted(rows)]}


def _key(row: Mapping[str, Any]) -> tuple[int, str, int]:
    return list(TEMPLATES).index(row["template"]), row["harness"], MODES.index(row["mode"])


def markdown(found: Json) -> str:
    """The page for people."""
    lines = [_HEAD]
    for template in TEMPLATES:
        rows = [row for row in found["rows"] if row["template"] == template]
        if rows:
            lines += ["", f"## {_TITLES[template]}", "", *_comparison(rows)]
    lines += ["", "## The books of every run", "", _BOOKS, "", *_books(found["rows"])]
    lines += ["", "## Why prompts drifted", "", *_causes(found["rows"])]
    lines += ["", "## Why calls were not continued", "", *_reasons(found["rows"])]
    lines += ["", "## Where prompts left the sampled tokens", "", _EXAMPLES, *_examples(found["rows"])]
    return "\n".join(lines) + "\n"


def _comparison(rows: Sequence[Json]) -> list[str]:
    heads = ["harness", "version", "wire API", "calls", "go on with an answer"]
    heads += ["splits by drift, render", "splits by drift, continue", "traces, render", "traces, continue"]
    by_mode = {(row["harness"], row["mode"]): row for row in rows}
    out = []
    for name in sorted({row["harness"] for row in rows}):
        pair = [by_mode.get((name, mode)) for mode in ("render", "continue")]
        one = next(row for row in reversed(pair) if row is not None)
        both = [[_told(row, key) for row in pair] for key in ("calls", "bases", "drifted", "traces")]
        calls, bases = (" / ".join(dict.fromkeys(values)) for values in both[:2])
        out.append([name, one["version"], one["dialect"], calls, bases, *both[2], *both[3]])
    total = [
        str(sum(row["drifted"] for row in rows if row["mode"] == mode and not row["fault"]))
        for mode in ("render", "continue")
    ]
    out.append(["**all**", "", "", "", "", *(f"**{number}**" for number in total), "", ""])
    return _table(heads, out)


def _told(row: Json | None, key: str) -> str:
    return "not run" if row is None or row["fault"] else str(row[key])


def _books(rows: Sequence[Json]) -> list[str]:
    heads = ["harness", "template", "mode", "ended", "recorded", "trained", "excluded", "adds up", "largest difference"]
    return _table(
        heads,
        (
            [
                row["harness"],
                row["template"],
                row["mode"],
                row["fault"] or row["detail"] or ", ".join(row["outcomes"]),
                row["recorded"],
                row["trained"],
                _counts(row["excluded"]),
                "yes" if row["adds_up"] else "NO",
                "-" if row["largest"] is None else f"{row['largest']:.1e} ({row['scored']} tokens)",
            ]
            for row in rows
        ),
    )


def _causes(rows: Sequence[Json]) -> list[str]:
    lines = [f"* **{name}**: {text}" for name, text in CAUSE_MEANINGS.items()]
    lines += ["", _PAIRS, ""]
    drifted = [row for row in rows if row["drifted"]]
    heads = ["harness", "template", "mode", "splits by drift", "of these, by cause"]
    return lines + _table(
        heads,
        (
            [row["harness"], row["template"], row["mode"], row["drifted"], _counts(row["causes"], " x ")]
            for row in drifted
        ),
    )


def _reasons(rows: Sequence[Json]) -> list[str]:
    heads = ["harness", "template", "calls", "continued", "not continued, by reason", "edges"]
    return _table(
        heads,
        (
            [
                row["harness"],
                row["template"],
                row["calls"],
                row["continued"],
                _counts(row["reasons"]),
                _counts(row["edges"]),
            ]
            for row in rows
            if row["mode"] == "continue"
        ),
    )


def _examples(rows: Sequence[Json]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        for one in row["differences"][:_SHOWN_DIFFERENCES] if row["template"] == "keeps" else ():
            cause = " + ".join(one["causes"])
            lines += ["", f"* {row['harness']}, {row['mode']}, token {one['position']} ({cause}), behind"]
            lines += [f"  `{_code(one['before'])}`", f"  * sampled: `{_tokens(one['sampled'])}`"]
            lines += [f"  * rendered: `{_tokens(one['rendered'])}`"]
    return lines


def _tokens(texts: Sequence[str]) -> str:
    return _code(" ¦ ".join(texts))


def _code(text: str) -> str:
    return text.replace("\n", "⏎").replace("`", "'").replace("\t", "⇥")


def _counts(value: Mapping[str, int], between: str = " ") -> str:
    return ", ".join(f"{number}{between}{name}" for name, number in value.items()) or "-"


def _table(heads: list[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return lines + ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


_TITLES = {
    "keeps": "A template that shows the reasoning of every turn",
    "strips": "A template that shows reasoning only behind the last message of a user",
}

_HEAD = """# Fidelity: are the tokens that are trained those that were sampled?

Made by `polar conformance --fidelity` (`scripts/fidelity.sh` starts the server that it needs); do not edit.

Real agent programs ran against the real gateway and a real vLLM: its template, tokenizer, parsers, prompts and
log-probabilities. Only *which* tokens are sampled was given, by a plugin in the server, so that every run says the same
awkward things: JSON with odd spaces, escapes, key order and numbers, booleans, empty and nested arguments, two calls at
once, a tool that does not exist, 30 kB of output, long answers, reasoning, text before calls, a second turn of the user
where the program can go on. One place in about 40 characters of an answer is cut into other tokens than the tokenizer's
own, as a policy at temperature 1 samples them. So `render` has as much drift here as it can have; how much a policy of
yours has depends on how it writes.

* **calls**: model calls of the run (render / continue, where the two differ).
* **go on with an answer**: calls whose conversation goes on, by meaning, from a recorded answer.
* **splits by drift**: calls that go on with an answer which is trained, whose prompt does not begin with its tokens,
  and where nothing was changed on purpose (`polar_proxy/traces/drift.py`). Each closes a training sequence and
  opens another one.
* **traces**: sequences that the builder `merged` makes of the run.

With your own model and harness: `polar doctor drift --harness H --engine vllm --engine-url URL` shows the first token
that differs, names the cause and says what helps."""

_BOOKS = """Every sampled token is trained or excluded with a reason. The largest difference, in nats, is that between
the log-probabilities recorded for the longest merged sequence and those of a fresh teacher-forced pass over it."""

_PAIRS = """`retokenised +`: the first tokens that differ read alike; further on the text differs, too. Other pairs: it
takes both to explain the difference."""

_EXAMPLES = """The first differences of each run: text before, then token by token (`¦` between tokens)."""
