"""A suite of attacks by agents, clients, archives and rows: does any of them succeed?

    python benchmarks/attacks.py                                         # all families, every sandbox that runs here
    python benchmarks/attacks.py --families rewards --sandboxes bubblewrap --only 'shadow*'
    python benchmarks/attacks.py --write                                 # and the tables of docs/security.md

Prints a Markdown table for each family. The exit code is 1 if an attack succeeds that is not documented to succeed, or
if an honest counterpart (a control) fails, and 2 if a family could not be run.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._attacks import tables  # noqa: E402
from benchmarks._attacks.outcome import AttackOptions, Outcome  # noqa: E402
from benchmarks._stacks.deployed import usable_sandboxes  # noqa: E402
from benchmarks._stacks.stacks import StackError  # noqa: E402
from sandboxes.base import SandboxKind  # noqa: E402

FAMILIES = [
    name
    for name in ("rewards", "escapes", "gateway", "data")
    if (Path(__file__).parent / "_attacks" / f"{name}.py").exists()
]


def run_family(name: str, kinds: list[SandboxKind], only: list[str]) -> list[Outcome]:
    folder = Path(tempfile.mkdtemp(prefix=f"polar-attacks-{name}-"))
    os.chmod(folder, 0o755)  # the sandbox must keep the agent out, not the permissions of this folder
    began = time.monotonic()

    def progress(line: str) -> None:
        report(f"{name} {time.monotonic() - began:6.1f} s  {line}")

    try:
        module = importlib.import_module(f"benchmarks._attacks.{name}")
        return asyncio.run(module.run(AttackOptions(tuple(kinds), folder, progress, tuple(only))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help=f"comma-separated list of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--sandboxes", help="comma-separated list; default: all that run here")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="shell pattern of attacks; repeat it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--write", action="store_true", help="update docs/security.md and benchmarks/results/attacks.*")
    arguments = parser.parse_args()
    families = arguments.families.split(",") if arguments.families else FAMILIES
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if arguments.write and arguments.only:
        parser.error("--write needs whole families: leave out --only")
    try:
        kinds, missing = usable_sandboxes(arguments.sandboxes)
    except ValueError as error:
        parser.error(str(error))
    outcomes: list[Outcome] = []
    try:
        for name in families:
            outcomes += run_family(name, kinds, arguments.only)
    except StackError as error:
        report(str(error))
        return 2
    if arguments.write:
        tables.write(outcomes)
    if arguments.json:
        print(json.dumps({"outcomes": [asdict(one) for one in outcomes], "missing": missing}, indent=1))
    else:
        print(tables.summary(outcomes))
        for name in families:
            print(f"\n## {name}\n\n{tables.family(outcomes, name)}")
    for one in outcomes:
        if one.pays or one.broken:
            report(f"{'PAYS' if one.pays else 'BROKEN CONTROL'}: {one.family} {one.attack} ({one.where}): {one.got}")
    if not outcomes:
        report("no attack was run: is the name that --only selects right?")
        return 2
    return 1 if any(one.pays or one.broken for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
