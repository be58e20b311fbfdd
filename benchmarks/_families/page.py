"""The table of model families on a real vLLM, and the page of the documentation with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks._families.continuing import FamilyResult
from benchmarks._families.families import PACKAGE, VERSION
from benchmarks._families.planned_session import PLAN
from benchmarks._families.real import ServedResult
from benchmarks._families.served_families import SERVED

GRADES = {
    "all": "all turns right",
    "some": "some turns right, the others rendered by the engine",
    "none": "not continued",
    "wrong": "accepted and wrong",
}
_HEAD = ("family", "template", "tool / reasoning parser", "continued", "read right", "splits", "largest", "reasons")


def grade_lines(results: Sequence[FamilyResult]) -> list[str]:
    counts = Counter(result.grade for result in results)
    return [f"{counts[grade]} {text}" for grade, text in GRADES.items()]


def served_table(results: Sequence[ServedResult]) -> str:
    return _table(map(served_row, results))


def _table(rows: Iterable[str]) -> str:
    return "\n".join([_line(_HEAD), _line(["---"] * len(_HEAD)), *rows])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def served_row(result: ServedResult) -> str:
    turns = f" of {len(PLAN) - 1}"
    largest = [session.largest for session in result.sessions if session.largest is not None]
    reasons: Counter[str] = Counter()
    for session in result.sessions:
        reasons.update(session.reasons)
    misread = sum(session.misread for session in result.sessions)
    notes = [*([result.problem] if result.problem else []), *(f"{count} {name}" for name, count in reasons.items())]
    if any(session.splits is None for session in result.sessions):
        notes.append("all answers were sampled under a grammar of the server's parser, and are not trained")
    if misread:
        notes.append(f"vLLM's chat route itself changes {misread} of the answers")
    cells = (
        result.name,
        result.template,
        result.parsers,
        _both(f"{session.continued}{turns}" for session in result.sessions),
        _both(f"{session.read} of {len(PLAN)}" for session in result.sessions),
        _both("-" if session.splits is None else str(session.splits) for session in result.sessions),
        f"{max(largest):.1e}" if largest else "-",
        "; ".join(notes).replace("|", "\\|").replace("\n", " ") or "-",
    )
    return _line(cells)


def _both(texts: Iterable[str]) -> str:
    """Join the values of the streamed and the whole session; one value if they are equal."""
    return " / ".join(dict.fromkeys(texts)) or "-"


def page(templates: Sequence[FamilyResult], served: Sequence[ServedResult], old: str) -> str:
    """Return the text of docs/families.md. Families that were not run keep their row of the old page, `old`."""
    rows = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("| ")}
    rows |= {result.name: served_row(result) for result in served}
    table = _table(rows[family.name] for family in SERVED if family.name in rows)
    notes = "\n".join(f"* {family.name}: {family.note}" for family in SERVED if family.note)
    grades = "\n".join(f"* {line}" for line in grade_lines(templates))
    return f"""\
# Model families

For which model families does Polar continue prompts from exact tokens ([how](guide/agents.md#exact-tokens))? This page
is generated: `python benchmarks/families.py --vllm --write`.

## Templates

{len(templates)} chat templates (from the source package of {PACKAGE} {VERSION}), rendered without an engine. Each
prompt is compared with an independent oracle, in a conversation with parallel calls and in nine variants of it (later
system messages, template flags, empty arguments, reasoning, white space). `benchmarks/families.py --templates` shows
each template.

{grades}

## On a real vLLM

vLLM on a CPU with the family's own parsers, and a small random model with the family's template, control tokens and
stop tokens. Its answers are prescribed, in the form of the template, and cut into other tokens than the tokenizer's. An
agent plays a session of {len(PLAN)} calls twice: streamed, and whole with its reasoning dropped. It sends the arguments
of tool calls back in another form.

"Read right" are answers that the agent received as they were planned; "splits" are training sequences beyond the first;
"largest" is the largest difference between a recorded log-probability and the one of the same ids in a prompt (nats).
A cell with two values has that of the streamed session first, then that of the whole one.

{table}

{notes}
"""
