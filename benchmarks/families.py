"""For which model families does prompt mode `continue` hold?

    python benchmarks/families.py --templates [--only NAME] [--json]
    python benchmarks/families.py --vllm [--only NAME] [--servers N] [--json] [--write]
    python benchmarks/families.py --grammars [--only NAME] [--write]
    python benchmarks/families.py --agents codex,pi --only Qwen3.5 [--write]

--templates: without an engine. 70 templates of llama.cpp (fetched from PyPI once) are rendered over the bundled
policy's tokenizer with each template's control tokens added, and every continued prompt is compared with an oracle
(`_families/continuing.py`).

--vllm: nineteen families on a real vLLM with their own parsers, through a gateway (`_families/real.py`). A family takes
a minute or more. --write runs both, and writes docs/families.md. Families that were not run keep their rows.

--grammars: the same families with requests for strict tools, for one call at a time, and for calls that must be made.
Which answers are sampled under a grammar, and are these recorded as constrained (`_families/grammars.py`)? --write
writes results/grammars.md.

--agents: real agents on a real vLLM with a family's template and parsers, in both prompt modes (`_families/agents.py`).
--write adds the rows to benchmarks/results/fidelity.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._families.agents import run_agents
from benchmarks._families.continuing import FamilyResult, FamilyRun, TurnResult
from benchmarks._families.families import load_families
from benchmarks._families.grammars import GrammarResult, grammar_page, run_grammars
from benchmarks._families.page import grade_lines, page, served_row, served_table
from benchmarks._families.real import ServedResult, run_families
from benchmarks._families.served_families import SERVED, STRICT_LEVEL
from benchmarks._families.template_engine import TemplateEngine
from harness_adapters.base import get_adapter
from polar_proxy.conformance.report import FIDELITY
from polar_proxy.types import Json

RESULTS = Path(__file__).resolve().with_name("results")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"


async def run_templates(only: str, folder: Path | None) -> list[FamilyResult]:
    out = []
    for family in load_families(folder):
        if only in family.name:
            out.append(await FamilyRun(TemplateEngine(family), _nothing_stored).run())
    return out


async def _nothing_stored(call_id: str) -> None:
    return None


def summary(turns: list[TurnResult]) -> str:
    """Return the turns' results as text: `ok` for right turns, the reason for others, each with its count."""
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
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n" + "\n".join(grade_lines(results))


async def run_served(only: str, servers: int) -> list[ServedResult]:
    out = []
    wanted = [served for served in SERVED if only.lower() in served.name.lower()]
    async for result in run_families(wanted, servers):
        seconds = f"{result.seconds:.0f} s, of which {result.start_seconds:.0f} s until vLLM was started"
        print(f"{served_row(result)} {seconds}", file=sys.stderr)
        out.append(result)
    return out


async def run_on_grammars(only: str) -> list[GrammarResult]:
    wanted = [served for served in (*SERVED, *STRICT_LEVEL) if only.lower() in served.name.lower()]
    out = []
    async for result in run_grammars(wanted):
        wrong = [row.request for row in result.rows if not row.right]
        print(f"{result.family}: {result.problem or f'recorded wrongly: {wrong}'}", file=sys.stderr)
        out.append(result)
    return out


async def run_on_agents(names: list[str], only: str, write: bool) -> Json:
    """Run agents on the families whose name contains `only`, and return the report's document."""
    cache = Path(os.environ.get("POLAR_CACHE_DIR") or Path("~/.polar/harnesses").expanduser())
    families = {family.name: family for family in load_families()}
    found = FIDELITY.merged(None, {"schema": 1})
    for served in SERVED:
        if only.lower() not in served.name.lower():
            continue
        adapters = [get_adapter(name) for name in names]
        async for row, document in run_agents(served, families[served.template], adapters, cache):
            counts = f"{row.continued} of {row.bases} continued, {row.drifted} splits by drift, largest {row.largest}"
            print(f"{row.harness}, {row.template}, {row.mode}: {row.fault or counts}", file=sys.stderr)
            found = FIDELITY.merged(found, document)
            if write:
                FIDELITY.save(RESULTS, document)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--templates", action="store_true", help="render the templates without an engine")
    what.add_argument("--vllm", action="store_true", help="run families on a real vLLM (POLAR_VLLM_CPU: its folder)")
    what.add_argument("--grammars", action="store_true", help="see which answers a real vLLM samples under a grammar")
    what.add_argument("--agents", default="", metavar="NAMES", help="run these agents on families, on a real vLLM")
    parser.add_argument("--folder", type=Path, help="a folder of *.jinja instead of the package's")
    parser.add_argument("--only", default="", help="templates or families whose name contains this")
    parser.add_argument("--servers", type=int, default=2, help="vLLM servers at a time")
    parser.add_argument("--write", action="store_true", help="write docs/families.md, grammars.md or fidelity.md")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.templates:
        results = asyncio.run(run_templates(arguments.only, arguments.folder))
        rows = [asdict(result) | {"grade": result.grade} for result in results]
        print(json.dumps(rows, indent=1) if arguments.json else table(results))
        return
    if arguments.grammars:
        text = grammar_page(measured := asyncio.run(run_on_grammars(arguments.only)))
        print(json.dumps([asdict(result) for result in measured], indent=1) if arguments.json else text)
        if arguments.write:
            (RESULTS / "grammars.md").write_text(text)
        return
    if arguments.agents:
        names = arguments.agents.split(",")
        document = asyncio.run(run_on_agents(names, arguments.only, arguments.write))
        print(json.dumps(document, indent=1) if arguments.json else FIDELITY.markdown(document))
        return
    served = asyncio.run(run_served(arguments.only, arguments.servers))
    print(json.dumps([asdict(result) for result in served], indent=1) if arguments.json else served_table(served))
    if arguments.write:
        PAGE.write_text(page(asyncio.run(run_templates("", None)), served, PAGE.read_text()))


if __name__ == "__main__":
    main()
