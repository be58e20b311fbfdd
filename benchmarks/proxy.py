"""Model calls per second through the gateway, recorded and committed, and the time that it adds to a call.

    python benchmarks/proxy.py [--json] [--seconds N] [--rounds N] [--quick] [--stacks NAME,...]
                               [--traffic calls,turns] [--mode render,continue] [--tokens 250,64] [--clients 1,16,64]

Compares it with the engine without a proxy, a bare pass-through, LiteLLM's proxy and rllm-model-gateway in one
interleaved run: single chats of 20 KB and conversations of twelve turns, answers of 250 tokens with ids and
log-probabilities, streamed and plain, 1, 16 and 64 clients. Each proxy is one process on one core; the engine and the
load generator share another core.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import sqlite3
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import uvloop  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks._stacks.load import LoadResult, measure  # noqa: E402
from benchmarks._stacks.stacks import (  # noqa: E402
    RunningStack,
    StackError,
    free_port,
    spawn,
    start_litellm,
    start_passthrough,
    start_polar,
    start_rllm,
    wait_ready,
)
from benchmarks._stacks.traffic import Kind  # noqa: E402
from tests.fakes.vllm_folder import write_model_folder  # noqa: E402

STACKS = "direct,passthrough,polar,litellm,rllm-model-gateway"
POLAR = {"render": "polar", "continue": "polar-continue"}


class TrafficCase(NamedTuple):
    """The traffic of one measurement."""

    traffic: Kind
    tokens: int
    """Tokens of an answer."""
    clients: int
    stream: bool

    def __str__(self) -> str:
        kind = "streamed" if self.stream else "whole"
        return f"{self.traffic} of {self.tokens} tokens, {self.clients} clients, {kind}"


WARM_UP_SECONDS = 0.7
NEAR_THE_LIMIT = 0.6
console = Console(stderr=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each measurement (4)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which the median is reported (3)")
    parser.add_argument("--quick", action="store_true", help="one round of one second")
    parser.add_argument("--stacks", default=STACKS, help="stacks to measure; polar means all its modes")
    parser.add_argument("--traffic", type=names("calls", "turns"), default=["calls", "turns"])
    parser.add_argument(
        "--mode", type=names("render", "continue"), default=["render", "continue"], help="prompt modes of polar"
    )
    parser.add_argument("--tokens", type=numbers, default=[250], help="tokens of an answer (250); a list measures each")
    parser.add_argument("--clients", type=numbers, default=[1, 16, 64])
    parser.add_argument("--tokens-per-chunk", type=int, default=10, help="tokens in a chunk of a streamed answer (10)")
    parser.add_argument("--keep", type=Path, help="keep databases and logs in this folder")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.rounds = 1.0, 1
    arguments.seconds = min(max(arguments.seconds, 0.2), 60.0)
    arguments.rounds = min(max(arguments.rounds, 1), 20)
    return arguments


def names(*known: str) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return text.split(",")

    return parse


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def cells(arguments: argparse.Namespace) -> list[TrafficCase]:
    every = product(arguments.traffic, arguments.tokens, arguments.clients, (False, True))
    return [TrafficCase(*values) for values in every]


def is_measured(stack: RunningStack, cell: TrafficCase) -> bool:
    """Skip single chats in continue mode: they have no earlier turn to continue."""
    return cell.traffic == "turns" or stack.name != POLAR["continue"]


def cores() -> tuple[int | None, int | None]:
    """Return two cores: for the proxies, and for load generator and engine. Both are None if only one is available."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return (allowed[0], allowed[1]) if len(allowed) > 1 else (None, None)


def start_all(
    arguments: argparse.Namespace, folder: Path, upstream: RunningStack, core: int | None
) -> tuple[list[RunningStack], dict[str, str]]:
    """Start the stacks; return those that run, and the reasons why the others do not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polar" / "benchmarks"
    url = f"http://127.0.0.1:{upstream.port}"
    starters: dict[str, Callable[[], RunningStack]] = {
        "direct": lambda: RunningStack("direct", "no proxy", upstream.port),
        "passthrough": partial(start_passthrough, url, core, folder),
        **{name: partial(start_polar, url, core, folder, name, mode) for mode, name in POLAR.items()},
        "litellm": partial(start_litellm, url, core, folder, cache),
        "rllm-model-gateway": partial(start_rllm, url, core, folder, cache),
    }
    running, missing = [], {}
    chosen = ",".join(POLAR[mode] for mode in arguments.mode)
    for name in re.sub(r"\bpolar\b(?!-)", chosen, arguments.stacks).split(","):
        console.print(f"[dim]starting {name}[/]")
        try:
            running.append(starters[name]())
        except KeyError:
            missing[name] = f"unknown; choose from {', '.join(starters)}"
        except StackError as error:
            missing[name] = str(error)
        if name in missing:
            console.print(f"{name} is skipped: {missing[name]}", style="yellow", highlight=False, markup=False)
    return running, missing


async def rounds(
    arguments: argparse.Namespace, stacks: list[RunningStack]
) -> tuple[dict[tuple[str, TrafficCase], list[LoadResult]], dict[str, int]]:
    """Measure every stack in every case, round by round. Also return the number of answers of each stack."""
    numbers = count(1)
    results: dict[tuple[str, TrafficCase], list[LoadResult]] = defaultdict(list)
    answered: dict[str, int] = defaultdict(int)

    async def one(stack: RunningStack, cell: TrafficCase, seconds: float) -> LoadResult:
        before = stack.cpu_seconds()
        result = await measure(
            stack.port,
            stack.path,
            stack.name,
            cell.clients,
            stream=cell.stream,
            seconds=seconds,
            numbers=numbers,
            kind=cell.traffic,
            tokens=cell.tokens,
        )
        result.cpu_seconds = stack.cpu_seconds() - before
        answered[stack.name] += result.answered
        return result

    for stack in stacks:
        for traffic, stream in product(arguments.traffic, (False, True)):
            first = await one(stack, TrafficCase(traffic, arguments.tokens[0], 4, stream), WARM_UP_SECONDS)
            if first.first_error:
                console.print(f"{stack.name}: {first.first_error}", style="red", highlight=False, markup=False)
    for number in range(arguments.rounds):
        for cell in cells(arguments):
            for stack in filter(lambda stack: is_measured(stack, cell), stacks):
                result = await one(stack, cell, arguments.seconds)
                results[stack.name, cell].append(result)
                console.print(
                    f"round {number + 1}: {stack.name}, {cell}: {result.rps:.0f}/s", style="dim", highlight=False
                )
    return results, dict(answered)


def median(values: list[float]) -> float | None:
    real = [value for value in values if not math.isnan(value)]
    return round(statistics.median(real), 3) if real else None


def rows_of(results: dict[tuple[str, TrafficCase], list[LoadResult]]) -> list[dict[str, Any]]:
    rows = []
    for (name, cell), measured in results.items():
        row: dict[str, Any] = {"stack": name, **cell._asdict()}
        row["rps"] = median([result.rps for result in measured])
        row["p50_ms"] = median([result.quantile_ms(0.5) for result in measured])
        row["p99_ms"] = median([result.quantile_ms(0.99) for result in measured])
        calls = sum(result.answered for result in measured)
        row["cpu_ms"] = round(sum(result.cpu_seconds for result in measured) * 1e3 / calls, 3) if calls else None
        row["requests"] = sum(len(result.latencies) for result in measured)
        row["errors"] = sum(result.errors for result in measured)
        row["first_error"] = next((result.first_error for result in measured if result.first_error), None)
        rows.append(row)
    return rows


def cell_of(row: dict[str, Any]) -> TrafficCase:
    return TrafficCase(row["traffic"], row["tokens"], row["clients"], row["stream"])


def added(rows: list[dict[str, Any]], field: str) -> dict[str, dict[str, float]]:
    """Return the added time by stack and case: `field` of the stack minus `field` of the same clients without a
    proxy."""
    base = {cell_of(row): row[field] for row in rows if row["stack"] == "direct"}
    out: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["stack"] != "direct" and row[field] is not None and base.get(cell_of(row)):
            out.setdefault(row["stack"], {})[str(cell_of(row))] = round(row[field] - base[cell_of(row)], 3)
    return out


def near_the_limit(rows: list[dict[str, Any]]) -> list[str]:
    """Name the rows whose rate is near that of the bare engine: the load generator may have limited them."""
    limit = {cell_of(row): row["rps"] for row in rows if row["stack"] == "direct"}
    return [
        f"{row['stack']}, {cell_of(row)}"
        for row in rows
        if row["stack"] != "direct"
        and row["clients"] > 1
        and (row["rps"] or 0) > NEAR_THE_LIMIT * (limit.get(cell_of(row)) or math.inf)
    ]


def committed(database: Path, answered: int, tokens: list[int]) -> dict[str, Any]:
    """Check that every answered request is completely in the database; count turns continued from exact tokens."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        placeholders = ",".join("?" * len(tokens))
        calls, complete = connection.execute(
            f"SELECT COUNT(*), SUM(status = 'ok' AND completion_tokens IN ({placeholders})) FROM v_calls", tokens
        ).fetchone()
        later, continued = connection.execute(
            "SELECT COUNT(*), SUM(prompt_mode = 'continue') FROM calls WHERE edge = 'continues'"
        ).fetchone()
    size = sum(path.stat().st_size for path in database.parent.glob(database.name + "*"))
    return {
        "answered": answered,
        "calls": calls,
        "ok_with_all_tokens": complete or 0,
        "equal": calls == answered == (complete or 0),
        "later_turns": later,
        "continued_from_exact_tokens": continued or 0,
        "bytes_per_call": round(size / calls) if calls else None,
    }


def print_report(arguments: argparse.Namespace, document: dict[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    table = Table(title="Model calls through one proxy process on one core")
    for name in ("stack", "traffic", "tokens", "clients", "answer", "calls/s", "p50 ms", "p99 ms", "CPU ms", "errors"):
        table.add_column(name, justify="left" if name in ("stack", "traffic", "answer") else "right", no_wrap=True)
    for row in sorted(document["rows"], key=cell_of):
        figures = [f"{row['rps']:,.0f}"] + [
            f"{row[key]:.2f}" if row[key] else "-" for key in ("p50_ms", "p99_ms", "cpu_ms")
        ]
        kind = "streamed" if row["stream"] else "whole"
        where = [row["stack"], row["traffic"], str(row["tokens"]), str(row["clients"]), kind]
        table.add_row(*where, *figures, str(row["errors"]))
    out = Console(width=None if sys.stdout.isatty() else 120)
    out.print(table)
    for name, gains in document["added_p50_ms"].items():
        one = {cell: value for cell, value in gains.items() if " 1 clients" in cell}
        out.print(f"{name} adds " + "; ".join(f"{value} ms ({cell})" for cell, value in one.items()))
    for name, reason in document["missing"].items():
        out.print(f"{name} was not measured: {reason}", style="yellow", markup=False)
    for note in document["notes"]:
        out.print(note)


def main() -> int:
    arguments = parse_arguments()
    proxy_core, load_core = cores()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="polar-benchmark-"))
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "benchmarks._stacks.upstream"]
    command += [str(port), ",".join(map(str, arguments.tokens)), str(arguments.tokens_per_chunk)]
    command.append(str(write_model_folder(folder / "model")))
    process, log = spawn("upstream", command, load_core, folder)
    stacks: list[RunningStack] = []
    upstream = RunningStack("upstream", "", port, process=process, log=log)
    try:
        try:
            wait_ready(upstream, f"http://127.0.0.1:{port}/health")
        except StackError as error:
            console.print(f"the benchmark's engine: {error}", style="red", highlight=False, markup=False)
            return 1
        stacks, missing = start_all(arguments, folder, upstream, proxy_core)
        if load_core is not None:
            os.sched_setaffinity(0, {load_core})
        results, answered = uvloop.run(rounds(arguments, stacks))
        memory = {stack.name: stack.rss_mb() for stack in stacks if stack.process is not None}
    finally:
        for stack in [*stacks, upstream]:
            stack.stop()
    rows = rows_of(results)
    notes = []
    if load_core is None:
        notes.append(
            "There is only one core: the proxies shared it with the load generator, so the figures mean little."
        )
    for where in near_the_limit(rows):
        notes.append(f"{where}: the load generator or the engine may have limited this rate.")
    document: dict[str, Any] = {
        "rows": rows,
        "added_p50_ms": added(rows, "p50_ms"),
        "added_p99_ms": added(rows, "p99_ms"),
        "missing": missing,
        "versions": {stack.name: stack.version for stack in stacks},
        "rss_mb": memory,
        "setting": {
            "seconds": arguments.seconds,
            "rounds": arguments.rounds,
            "answer_tokens": arguments.tokens,
            "tokens_per_chunk": arguments.tokens_per_chunk,
            "proxy_core": proxy_core,
            "load_core": load_core,
            "python": platform.python_version(),
            "load_average": os.getloadavg(),
        },
        "notes": notes,
    }
    failed = False
    document["committed"] = {}
    for mode, name in POLAR.items():
        if name not in answered:
            continue
        check = document["committed"][mode] = committed(folder / f"{name}.db", answered[name], arguments.tokens)
        failed |= not check["equal"]
        word = "" if check["equal"] else "NOT "
        notes.append(f"{name}: the {answered[name]} answered requests are {word}all committed with all their tokens.")
        if mode == "continue":
            failed |= check["later_turns"] != check["continued_from_exact_tokens"]
            done = f"{check['continued_from_exact_tokens']} of {check['later_turns']}"
            notes.append(f"{name}: {done} later turns were sampled from the exact tokens of the turn before.")
    print_report(arguments, document)
    if arguments.keep is None and not failed:
        shutil.rmtree(folder)
    elif failed:
        console.print(f"[red]database and logs are in {folder}[/]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
