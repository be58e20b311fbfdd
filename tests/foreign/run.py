"""Install the suites of other projects, run them against Polar with the obliging engine, and print a table.

Each suite of `versions.toml` gets a folder of its own below $POLAR_HOME/foreign (default: ~/.polar/foreign), named by
its packages: a Python environment, or a folder of node_modules. A folder that is complete is used again. Open
Responses' compliance test has no package: it runs from a checkout, which is given.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).parent
_REPORT = _HERE.parent.parent / "benchmarks" / "results" / "foreign_suites.md"
_COMPLIANCE = "Open Responses compliance"


@dataclass(frozen=True)
class Suite:
    name: str
    program: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The folder of its packages."""
        home = Path(os.environ.get("POLAR_HOME") or Path.home() / ".polar")
        digest = hashlib.sha256("\n".join(self.packages).encode()).hexdigest()[:8]
        return home / "foreign" / f"{Path(self.program).name.split('.')[0]}-{digest}"

    @property
    def javascript(self) -> bool:
        return self.program.endswith(".mjs")


@dataclass
class SuiteResult:
    name: str
    packages: str
    passed: int = 0
    total: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of skipped cases by reason."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """(test, first line of its error)"""


def read_suites() -> list[Suite]:
    listed = tomllib.loads((_HERE / "versions.toml").read_text())["suite"]
    return [Suite(one["name"], one["program"], tuple(one["packages"])) for one in listed]


def install(suite: Suite) -> None:
    """Install the packages of a suite, unless they are. Raises CalledProcessError."""
    folder, done = suite.folder, suite.folder / ".complete"
    if done.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"installing {suite.name} into {folder}", file=sys.stderr, flush=True)
    if suite.javascript:
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--silent", *suite.packages], cwd=folder, check=True
        )
    else:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *suite.packages], check=True)
    done.touch()


def run(suite: Suite) -> SuiteResult:
    """Run a suite. Raises FileNotFoundError if it ended without a report."""
    folder = suite.folder
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    program = Path(shutil.copy(_HERE / "suites" / suite.program, folder))
    if suite.javascript:
        to_report = ["--test-reporter=junit", f"--test-reporter-destination={report}"]
        command = ["node", "--test", *to_report, str(program)]
    else:
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "-o", "asyncio_mode=auto", "--tb=short"]
        # One event loop for all tests, because the libraries share connections between their clients.
        options += ["-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session"]
        command = [str(folder / "bin" / "python"), "-m", "pytest", *options, f"--rootdir={folder}"]
        command += [f"--confcutdir={folder}", f"--junitxml={report}", str(program)]
    subprocess.run([sys.executable, "-m", "tests.foreign.serve", *command], stdout=sys.stderr)
    return read_report(SuiteResult(suite.name, ", ".join(suite.packages)), report)


def read_report(result: SuiteResult, report: Path) -> SuiteResult:
    """Add the cases of a JUnit report to a result. An expected failure (xfail) counts as skipped, with its reason."""
    for case in ElementTree.parse(report).iter("testcase"):
        if (skipped := case.find("skipped")) is not None:
            result.skipped[_first_line(skipped.get("message") or "no reason given")] += 1
            continue
        result.total += 1
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is None:
            result.passed += 1
        else:
            text = problem.get("message") or problem.text or ""
            result.failures.append((case.get("name") or "?", _first_line(text)))
    return result


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]


def run_compliance(checkout: Path) -> SuiteResult:
    """Run Open Responses' compliance test from a checkout.

    With Bun (`bun install` in the checkout), else with Node.js 22 or newer (`npm install zod@3 tsx` in the checkout).
    """
    script = ["bun", "bin/compliance-test.ts"] if shutil.which("bun") else ["npx", "tsx", "bin/compliance-test.ts"]
    options = "--base-url $POLAR_URL/v1 --api-key open-responses --model scripted-model --json"
    command = ["sh", "-c", f"cd '{checkout}' && {' '.join(script)} {options}"]
    done = subprocess.run([sys.executable, "-m", "tests.foreign.serve", *command], stdout=subprocess.PIPE, text=True)
    found = re.search(r"\{.*\}", done.stdout, re.DOTALL)
    if found is None:
        raise SystemExit(f"The compliance test in {checkout} printed no results:\n{done.stdout[-2000:]}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True)
    result = SuiteResult(_COMPLIANCE, f"a checkout, commit {commit.stdout.strip() or 'unknown'}")
    for case in json.loads(found[0])["results"]:
        result.total += case["status"] != "skipped"
        result.passed += case["status"] == "passed"
        reason = "; ".join(case.get("errors") or ["no reason given"])[:200]
        if case["status"] == "skipped":
            result.skipped[reason] += 1
        elif case["status"] == "failed":
            result.failures.append((case["name"], reason))
    return result


def table(results: list[SuiteResult]) -> str:
    lines = ["| suite | passed | of | skipped | packages |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.name} | {one.passed} | {one.total} | {one.skipped.total()} | {one.packages} |" for one in results
    ]
    failures = [f"* {one.name}, `{name}`: {reason}" for one in results for name, reason in one.failures]
    lines += ["", "Remaining failures:", "", *failures] if failures else ["", "No failures."]
    skipped = [f"* {one.name}, {number}: {reason}" for one in results for reason, number in one.skipped.items()]
    lines += ["", "Skipped, with the suite's reason:", "", *skipped] if skipped else []
    return "\n".join(lines) + "\n"


def main() -> int:
    """Return 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="scripts/foreign_suites.sh", description=__doc__)
    parser.add_argument(
        "--open-responses", type=Path, metavar="CHECKOUT", help="checkout of openresponses/openresponses"
    )
    parser.add_argument("--only", action="append", metavar="SUITE", help="run this suite only; can be repeated")
    parser.add_argument("--write", action="store_true", help=f"write the table to {_REPORT.name} in benchmarks/results")
    given = parser.parse_args()
    suites = read_suites()
    if unknown := set(given.only or ()) - {suite.name for suite in suites}:
        parser.error(f"there is no suite {min(unknown)!r}; there are {', '.join(suite.name for suite in suites)}")
    results = []
    for suite in suites:
        if given.only is None or suite.name in given.only:
            install(suite)
            results.append(run(suite))
    if given.open_responses is not None:
        results.append(run_compliance(given.open_responses))
    found = table(results)
    print(found)
    if given.write:
        _REPORT.write_text(f"{_HEAD}\n{found}")
    return 1 if any(one.failures for one in results) else 0


_HEAD = """# Suites of other projects

Made by `scripts/foreign_suites.sh --write`. The clients are the real packages; the gateway is Polar with a scripted
engine that calls the tools it is offered and fills in the schema it is given (`tests/foreign/obliging_engine.py`), so
the suites test the wire and not a model. A skipped case concerns what a model or a provider's own service would have
to offer.
"""

if __name__ == "__main__":
    sys.exit(main())
