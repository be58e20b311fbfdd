"""Markdown tables of outcomes: printed, kept in benchmarks/results/attacks.md, and as counts in docs/security.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks._attacks.outcome import Outcome

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "attacks.json"
SECURITY_PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- attacks: begin (benchmarks/attacks.py --write) -->", "<!-- attacks: end -->"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a table of counts with a row for each family and `where`."""
    rows = [["family", "where", "attacks", "stopped", "known to succeed", "**pay**", "honest controls that work"]]
    for family_name in dict.fromkeys(one.family for one in outcomes):
        own = [one for one in outcomes if one.family == family_name]
        for where in dict.fromkeys(one.where for one in own):
            here = [one for one in own if one.where == where]
            attacks = [one for one in here if not one.control]
            controls = [one for one in here if one.control]
            known = sum(one.reached and one.expected for one in attacks)
            pays = sum(one.pays for one in attacks)
            working = f"{sum(one.reached for one in controls)} of {len(controls)}" if controls else ""
            counts = [len(attacks), len(attacks) - known - pays, known, pays]
            rows.append([family_name, where, *map(str, counts), working])
    return table(rows)


def family(outcomes: Sequence[Outcome], name: str) -> str:
    """Return a table with a row for each attack of a family, and a column for each `where`."""
    own = [one for one in outcomes if one.family == name]
    places = list(dict.fromkeys(one.where for one in own))
    found = {(one.attack, one.where): one for one in own}
    rows = [["attack", *places]]
    for attack in dict.fromkeys(one.attack for one in own):
        rows.append([attack, *(cell(found.get((attack, where))) for where in places)])
    return table(rows)


def cell(one: Outcome | None) -> str:
    if one is None:
        return ""
    got = " ".join(one.got.split())[:120].replace("|", "\\|")
    if one.control:
        return f"honest, works: {got}" if one.reached else f"**honest, fails**: {got}"
    return f"**reached**{' (known)' if one.expected else ''}: {got}" if one.reached else got


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rest])


def write(outcomes: Sequence[Outcome]) -> None:
    """Replace the families that were run in the kept results, and make both pages from all kept results.

    Paths of this checkout are written relative to it.
    """
    kept = [Outcome(**one) for one in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    new = {one.family for one in outcomes}
    every = [one for one in kept if one.family not in new]
    every += [replace(one, got=one.got.replace(f"{ROOT}/", "")) for one in outcomes]
    every.sort(key=lambda one: one.family)
    RESULTS.write_text(json.dumps([asdict(one) for one in every], indent=0) + "\n")
    sections = [f"## {name}\n\n{family(every, name)}\n" for name in dict.fromkeys(one.family for one in every)]
    head = "# Attacks\n\nMade by `python benchmarks/attacks.py --write`; do not edit.\n\n"
    RESULTS.with_suffix(".md").write_text(head + summary(every) + "\n\n" + "\n".join(sections))
    before, begin, rest = SECURITY_PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{SECURITY_PAGE} has no place for the table: it needs the lines {BEGIN} and {END}")
    SECURITY_PAGE.write_text(f"{before}{BEGIN}\n{summary(every)}\n{END}{after}")
