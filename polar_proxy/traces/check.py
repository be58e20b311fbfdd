"""`python -m polar_proxy.traces.check FILE`: are the rows of a `tokens-jsonl` export what their certificates say?

Needs the rows alone: no database, no engine, no calls. What it finds, and what no certificate can tell, is listed in
`docs/certificate.md`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from polar_proxy.traces import grades, hash_chain
from polar_proxy.traces.certificate import SCHEMA
from polar_proxy.traces.exclusions import MISSING_LOGPROB
from polar_proxy.traces.schema import certificate_schema, violations
from polar_proxy.types import Json, TokenIds

_IDENTITY = ("trace_id", "session_id", "rollout_id", "builder", "grade", "parent_trace_id")
_SPAN = ("kind", "call_id", "choice", "start", "end")
_SHOWN = 3
"""Of the problems of a row, in its line."""


@dataclass(slots=True)
class FileCheck:
    """What was found. `bad`: (line number from 1, trace id if it can be told, problems) of each bad row."""

    rows: int = 0
    bad: list[tuple[int, str | None, list[str]]] = field(default_factory=list)

    def to_json(self) -> Json:
        told = [{"line": line, "trace_id": trace_id, "problems": problems} for line, trace_id, problems in self.bad]
        return {"rows": self.rows, "bad": told}


def check_lines(lines: Iterable[bytes]) -> FileCheck:
    """Check rows one by one, and that they fit together: no answer is trained twice, every branch has its parent."""
    found: dict[int, tuple[str | None, list[str]]] = {}
    together = CrossRowChecks()
    rows = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        rows += 1
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            found[number] = (None, [f"this is not JSON: {error}"])
            continue
        problems = check_row(row)
        trace_id = row.get("trace_id") if isinstance(row, dict) else None
        if not problems:
            problems = together.add(number, row)
        found[number] = (trace_id if isinstance(trace_id, str) else None, problems)
    for number, problem in together.branches():
        found[number][1].append(problem)
    return FileCheck(rows, [(number, *told) for number, told in sorted(found.items()) if told[1]])


def check_row(row: Any) -> list[str]:
    """What is wrong with a row by itself; empty if nothing is."""
    if not isinstance(row, dict):
        return ["this is not a row"]
    certificate = row.get("certificate")
    if not isinstance(certificate, dict):
        return ["there is no certificate"]
    version = certificate.get("schema")
    if isinstance(version, int) and version > SCHEMA:
        return [f"the certificate is of schema {version}, this Polar knows {SCHEMA}: update Polar"]
    if wrong := [*violations(certificate, certificate_schema()), *_shapes(row)]:
        return wrong
    if wrong := [*_identity(row, certificate), *_spans(row, certificate)]:
        return wrong
    return [*_values(row, certificate), *_chain(row, certificate), *_places(certificate), *_reasons(certificate)]


def _shapes(row: Json) -> Iterator[str]:
    for name in ("prompt_ids", "response_ids"):
        ids = row.get(name)
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
            yield f"{name} is not a list of token ids"
    mask, logprobs, spans = row.get("loss_mask"), row.get("logprobs"), row.get("spans")
    if not isinstance(mask, list) or not all(type(one) is int and one in (0, 1) for one in mask):
        yield "loss_mask is not a list of 0 and 1"
    if not isinstance(logprobs, list) or not all(one is None or type(one) in (int, float) for one in logprobs):
        yield "logprobs is not a list of numbers and null"
    if not isinstance(spans, list):
        yield "spans is not a list"
    sizes = {len(row[name]) for name in ("response_ids", "loss_mask", "logprobs") if isinstance(row.get(name), list)}
    if len(sizes) > 1:
        yield "response_ids, loss_mask and logprobs are of different lengths"


def _identity(row: Json, certificate: Json) -> Iterator[str]:
    for name in _IDENTITY:
        if row.get(name) != certificate[name]:
            yield f"{name} is {row.get(name)!r}, in the certificate {certificate[name]!r}"
    if row.get("branch_at", 0) != certificate["branch_at"]:
        yield f"branch_at is {row.get('branch_at')!r}, in the certificate {certificate['branch_at']}"


def _spans(row: Json, certificate: Json) -> Iterator[str]:
    """They tile the sequence."""
    spans = certificate["spans"]
    if row["spans"] != [{name: span[name] for name in _SPAN} for span in spans]:
        yield "the row has other spans than its certificate"
    if any(span["n"] != span["end"] - span["start"] for span in spans):
        yield "a span is not as long as its offsets say"
    total, size = len(row["prompt_ids"]) + len(row["response_ids"]), sum(span["n"] for span in spans)
    if total != size:
        yield f"the spans tile {size} tokens, the row has {total}"
    before = 0
    for span in spans:
        if span["kind"] == "sampled":
            break
        before += span["n"]
    if not before == certificate["prompt_length"] == len(row["prompt_ids"]):
        yield "prompt_ids is not what stands before the first answer"


def _values(row: Json, certificate: Json) -> Iterator[str]:
    """The mask is 1 and a finite log-probability stands exactly on sampled spans."""
    sampled = [span["kind"] == "sampled" for span in certificate["spans"] for _ in range(span["n"])]
    sampled = sampled[len(row["prompt_ids"]) :]
    if sampled != [one == 1 for one in row["loss_mask"]]:
        yield "the mask is not that of the spans"
    if any((value is not None) != one for value, one in zip(row["logprobs"], sampled, strict=True)):
        yield "log-probabilities do not stand exactly on the sampled tokens"
    told = np.array([value for value in row["logprobs"] if value is not None], dtype=np.float64)
    if not (np.isfinite(told) & (told > MISSING_LOGPROB)).all():
        yield "a log-probability is none"


def _chain(row: Json, certificate: Json) -> Iterator[str]:
    first = hash_chain.seed(certificate)
    if first.hex() != certificate["seed"]:
        yield "the certificate's own fields were changed: they do not make its seed"
        return
    logprobs = [None] * len(row["prompt_ids"]) + row["logprobs"]
    ids, values = hash_chain.as_arrays(row["prompt_ids"] + row["response_ids"], logprobs)
    links = hash_chain.links(first, certificate["spans"], ids, values)
    for number, (span, link) in enumerate(zip(certificate["spans"], links, strict=True)):
        if span["hash"] != link.hex():
            yield (
                f"the hashes do not chain at span {number} ({span['kind']}, {span['call_id']}): its tokens, "
                "log-probabilities or fields were changed"
            )
            return
    if certificate["head"] != links[-1].hex():
        yield "the last hash is not that of the last span"


def _places(certificate: Json) -> Iterator[str]:
    """What stands before an answer is its call's prompt; where it is not, the trace says so."""
    spans = certificate["spans"]
    for span, following in pairwise([*spans, None]):
        if span["kind"] == "context" and (
            following is None or (following["kind"], following["call_id"]) != ("sampled", span["call_id"])
        ):
            yield f"no answer of {span['call_id']} follows its context"
    position = certificate["branch_at"]
    heard = set()
    for span in spans:
        if span["kind"] == "context":
            if span["start"] != position and grades.CANONICAL not in certificate["why"]:
                yield f"the context of {span['call_id']} begins at {span['start']} of its prompt and at {position} here"
        else:
            if span["start"] != 0:
                yield f"an answer of {span['call_id']} is not whole"
            if (answer := (span["call_id"], span["choice"])) in heard:
                yield f"an answer of {span['call_id']} is trained twice"
            heard.add(answer)
            starts = [start for start, _ in span["versions"]]
            if starts[0] != 0 or any(one >= other for one, other in pairwise([*starts, span["n"]])):
                yield f"the policy versions of {span['call_id']} do not tile its answer"
            if span["engine"] >= len(certificate["engines"]):
                yield f"the engine of {span['call_id']} is not described"
        position += span["n"]
    calls = {call_id for call_id, _ in heard}
    if any(found["call_id"] not in calls for found in certificate["drift"]):
        yield "a finding is about a call that is not in the trace"


def _reasons(certificate: Json) -> Iterator[str]:
    """The grade is what the spans make it."""
    why, sampled = set(certificate["why"]), [span for span in certificate["spans"] if span["kind"] == "sampled"]
    joined = any(found["outcome"] == "canonical" for found in certificate["drift"])
    shown = {
        grades.CONTINUED: any(span["prompt_mode"] == "continue" for span in sampled),
        grades.OFF_DISTRIBUTION: any(span["sampling"] is not None for span in sampled),
        grades.WEIGHTS_CHANGED: any(
            len(span["versions"]) == 1 and ".." in (span["versions"][0][1] or "") for span in sampled
        ),
        grades.RESCORED: certificate["rescored"] is not None,
        grades.CANONICAL: joined,
    }
    for reason, expected in shown.items():
        if (reason in why) != expected:
            yield f"the reason {reason} is {'missing' if expected else 'given without cause'}"
    policy = certificate["on_drift"]
    if (policy is None) != (certificate["builder"] in ("per_call", "tree")) or (joined and policy == "split"):
        yield f"on_drift cannot be {policy!r} here"
    if (certificate["parent_trace_id"] is None) != (certificate["branch_hash"] is None) or (
        certificate["parent_trace_id"] is None
    ) != (certificate["branch_at"] == 0):
        yield "the branch is told in part only"
    made = grades.grade_of(why)
    told = certificate["grade"]
    if told != made and (certificate["audit"] is None or grades.GRADES.index(told) < grades.GRADES.index(made)):
        yield f"the grade is {told}, by its reasons it is {made}"


class CrossRowChecks:
    """What can only be told from several rows. `add` takes rows that are right by themselves."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str, str, int], int] = {}
        self._trees: dict[str, tuple[int, Mapping[str, Any], TokenIds]] = {}

    def add(self, number: int, row: Json) -> list[str]:
        certificate = row["certificate"]
        problems = []
        for span in certificate["spans"]:
            if span["kind"] == "sampled":
                key = (certificate["builder"], certificate["session_id"], span["call_id"], span["choice"])
                if (line := self._answers.setdefault(key, number)) != number:
                    problems.append(f"an answer of {span['call_id']} is trained in line {line} already")
        if certificate["builder"] == "tree" and certificate["trace_id"] not in self._trees:
            ids = np.array(row["prompt_ids"] + row["response_ids"], dtype=np.int32)
            self._trees[certificate["trace_id"]] = (number, certificate, ids)
        return problems

    def branches(self) -> Iterator[tuple[int, str]]:
        for number, certificate, _ in self._trees.values():
            if certificate["parent_trace_id"] is None:
                continue
            before = self._before(certificate)
            if before is None:
                yield number, f"it branches from {certificate['parent_trace_id']}, which is not in this file or is bad"
            elif hash_chain.tokens_hash(before) != certificate["branch_hash"]:
                yield number, f"what it branches from in {certificate['parent_trace_id']} are other tokens"

    def _before(self, certificate: Mapping[str, Any]) -> TokenIds | None:
        """The tokens that come before a trace's own; None where they are not all here."""
        pieces: list[TokenIds] = []
        end = certificate["branch_at"]
        while certificate["parent_trace_id"] is not None:
            parent = self._trees.get(certificate["parent_trace_id"])
            if parent is None:
                return None
            _, certificate, ids = parent
            own = end - certificate["branch_at"]
            if not 0 < own <= len(ids):
                return None
            pieces.append(ids[:own])
            end = certificate["branch_at"]
        return np.concatenate(pieces[::-1])


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: every row is right; 1: some are not; 2: the file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m polar_proxy.traces.check", description=__doc__)
    parser.add_argument("file", help="a tokens-jsonl export; - is standard input")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args(arguments)
    try:
        if given.file == "-":
            checked = check_lines(sys.stdin.buffer)
        else:
            with Path(given.file).open("rb") as lines:
                checked = check_lines(lines)
    except OSError as error:
        print(f"error: cannot read {given.file}: {error.strerror}", file=sys.stderr)
        return 2
    if given.json:
        print(orjson.dumps(checked.to_json(), option=orjson.OPT_INDENT_2).decode())
    else:
        for line, trace_id, problems in checked.bad:
            more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
            print(f"{given.file}:{line}: {trace_id or 'row'}: {'; '.join(problems[:_SHOWN])}{more}")
        print(f"{checked.rows} rows, {len(checked.bad)} bad", file=sys.stderr)
    return 1 if checked.bad else 0


if __name__ == "__main__":
    sys.exit(main())
