"""`python -m polar_proxy.traces.check FILE`: check the rows of a `tokens-jsonl` export against their certificates.

The check needs only the rows: no database, no engine, no calls. `docs/guide/data.md` lists what the check finds, and
what certificates cannot show. `--schema` prints the JSON Schema of certificates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from polar_proxy.sequences import trace_path
from polar_proxy.terminal import escape_json_controls, one_line
from polar_proxy.traces import grades
from polar_proxy.traces.certificate import (
    CERTIFICATE_SCHEMA,
    IDENTITY_FIELDS,
    Certificate,
    SampledSpan,
    hash_json,
    hash_spans,
    hash_tokens,
)
from polar_proxy.traces.rows import RowError, describe_errors, read_row
from polar_proxy.types import AnswerSampling, Span, Trace

_PROBLEMS_SHOWN = 3
"""Maximum number of problems that are printed for one row."""


@dataclass(frozen=True, slots=True)
class RowCheck:
    """The result of checking one row: its problems, and its trace and certificate as far as they could be read."""

    problems: list[str]
    trace: Trace | None = None
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True)
class LineProblems:
    """The problems of one line of a file."""

    line: int
    """Number of the line, from 1 on."""
    trace_id: str | None
    """The id of the line's trace, if it is known."""
    problems: list[str]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The result of checking a file."""

    rows: int
    bad: list[LineProblems]


def check_lines(lines: Iterable[bytes]) -> FileCheck:
    """Check each row by itself, and then all rows together.

    Together, the rows must train no answer twice, and must contain the parent of every branch.
    """
    found: dict[int, LineProblems] = {}
    together = CrossRowChecks()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            found[number] = LineProblems(number, None, [f"this is not JSON: {error}"])
            continue
        checked = check_row(row)
        problems = checked.problems
        if not problems and checked.trace is not None and checked.certificate is not None:
            problems = together.add(number, checked.trace, checked.certificate)
        trace_id = row.get("trace_id") if isinstance(row, dict) else None
        found[number] = LineProblems(number, trace_id if isinstance(trace_id, str) else None, problems)
    for number, problem in together.check_branches():
        found[number].problems.append(problem)
    return FileCheck(len(found), [line for line in found.values() if line.problems])


def check_row(row: Any) -> RowCheck:
    if not isinstance(row, dict):
        return RowCheck(["this is not a row: a row is a JSON object"])
    fields = row.get("certificate")
    if not isinstance(fields, dict):
        return RowCheck(["there is no certificate"])
    schema, known = fields.get("schema"), CERTIFICATE_SCHEMA
    if isinstance(schema, int) and schema < known:
        return RowCheck([f"the certificate has schema {schema}, and this Polar reads {known}: export the row again"])
    if isinstance(schema, int) and schema > known:
        return RowCheck([f"the certificate has schema {schema}, and this Polar knows {known}: update Polar"])
    try:
        certificate = Certificate.model_validate(fields)
    except ValidationError as error:
        return RowCheck([f"certificate.{line}" for line in describe_errors(error)])
    try:
        trace = read_row(row)
    except RowError as error:
        return RowCheck([str(error)])
    problems = list(_identity_problems(trace, certificate))
    if not problems:
        problems = [
            *_hash_problems(trace, certificate),
            *_span_problems(certificate),
            *_reason_problems(certificate),
        ]
    return RowCheck(problems, trace, certificate)


def _identity_problems(trace: Trace, certificate: Certificate) -> Iterator[str]:
    for name in (*IDENTITY_FIELDS, "grade"):
        if getattr(trace, name) != getattr(certificate, name):
            yield f"{name} is {getattr(trace, name)!r}, and {getattr(certificate, name)!r} in the certificate"
    spans = [Span(span.kind, span.call_id, span.start, span.end, span.choice) for span in certificate.spans]
    if spans != list(trace.spans):
        yield "the row has other spans than its certificate"
    certified = tuple(_samplings(certificate))
    if len(certified) == len(trace.sampling) and certified != trace.sampling:
        yield "the row's answers were sampled in another way than its certificate says"
    if any(span.n != span.end - span.start for span in certificate.spans):
        yield "a span's n is not end - start"


def _samplings(certificate: Certificate) -> Iterator[AnswerSampling]:
    """Yield how each answer was sampled.

    An answer whose engine is missing from the certificate is skipped; `_span_problems` reports it.
    """
    for span in certificate.spans:
        if isinstance(span, SampledSpan) and span.engine < len(certificate.engines):
            mode = certificate.engines[span.engine].logprob_mode
            yield AnswerSampling(span.temperature, span.changes, mode, tuple(span.versions))


def _hash_problems(trace: Trace, certificate: Certificate) -> Iterator[str]:
    seed = hash_json(b"", certificate.header())
    if seed.hex() != certificate.seed:
        yield "the certificate's own fields were changed: their hash is not its seed"
        return
    spans = [span.model_dump(exclude={"hash"}) for span in certificate.spans]
    hashes = hash_spans(seed, spans, trace.token_ids, trace.logprobs)
    for number, (span, link) in enumerate(zip(certificate.spans, hashes, strict=True)):
        if span.hash != link.hex():
            yield (
                f"the hash of span {number} ({span.kind}, {span.call_id}) does not match: its tokens, "
                "log-probabilities or fields were changed"
            )
            return
    if certificate.head != hashes[-1].hex():
        yield "the last hash is not that of the last span"


def _span_problems(certificate: Certificate) -> Iterator[str]:
    """Yield the contradictions in the spans, such as an answer that is not whole or occurs twice.

    An answer must follow its call's whole prompt, unless the certificate gives the reason `canonical`.
    """
    for span, following in zip(certificate.spans, [*certificate.spans[1:], None], strict=True):
        answers_it = following is not None and (following.kind, following.call_id) == ("sampled", span.call_id)
        if span.kind == "context" and not answers_it:
            yield f"the context of {span.call_id} is not followed by an answer of that call"
    position = certificate.branch_at
    answers = set()
    for span in certificate.spans:
        if span.kind == "context":
            if span.start != position and "canonical" not in certificate.grade_reasons:
                yield f"the context of {span.call_id} begins at {span.start} in its prompt and {position} in the trace"
        else:
            if span.start != 0:
                yield f"an answer of {span.call_id} is not whole"
            if (answer := (span.call_id, span.choice)) in answers:
                yield f"an answer of {span.call_id} is trained twice"
            answers.add(answer)
            starts = [start for start, _ in span.versions]
            if starts[0] != 0 or any(one >= other for one, other in pairwise([*starts, span.n])):
                yield f"the policy versions of {span.call_id} do not tile its answer"
            if span.engine >= len(certificate.engines):
                yield f"the engine of {span.call_id} is not described"
        position += span.n
    calls = {call_id for call_id, _ in answers}
    if any(event.call_id not in calls for event in certificate.drift):
        yield "a drift event names a call that is not in the trace"


def _reason_problems(certificate: Certificate) -> Iterator[str]:
    """Yield a problem for each reason that contradicts the spans, and for a grade that contradicts the reasons."""
    reasons = set(certificate.grade_reasons)
    sampled = [span for span in certificate.spans if isinstance(span, SampledSpan)]
    joined = any(event.outcome == "canonical" for event in certificate.drift)
    expected = {
        "continued": any(span.prompt_mode == "continue" for span in sampled),
        "off_distribution": any(map(grades.is_off_distribution, _samplings(certificate))),
        "weights_changed": any(grades.weights_changed(span.versions) for span in sampled),
        "rescored": certificate.rescored is not None,
        "canonical": joined,
    }
    for reason, holds in expected.items():
        if (reason in reasons) != holds:
            yield f"the reason {reason} is {'missing' if holds else 'given without cause'}"
    policy = certificate.on_drift
    if (policy is None) != (certificate.builder in ("per_call", "tree")) or (joined and policy == "split"):
        yield f"on_drift cannot be {policy!r} here"
    is_root = certificate.parent_trace_id is None
    if is_root != (certificate.branch_hash is None) or is_root != (certificate.branch_at == 0):
        yield "parent_trace_id, branch_at and branch_hash must be set together"
    allowed = grades.grade_of(reasons)
    grade = certificate.grade
    lowered = grades.GRADES.index(grade) > grades.GRADES.index(allowed)
    if grade != allowed and not (certificate.audit is not None and lowered):
        yield f"the grade is {grade}, and its reasons give {allowed}"


class CrossRowChecks:
    """Checks that need several rows. `add` takes rows that passed `check_row`."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str, str, int], int] = {}
        self._tree_rows: dict[str, tuple[int, Trace, Certificate]] = {}

    def add(self, number: int, trace: Trace, certificate: Certificate) -> list[str]:
        problems = []
        for span in certificate.spans:
            if span.kind == "sampled":
                key = (certificate.builder, certificate.session_id, span.call_id, span.choice)
                if (line := self._answers.setdefault(key, number)) != number:
                    problems.append(f"an answer of {span.call_id} is trained in line {line} already")
        if certificate.builder == "tree":
            self._tree_rows.setdefault(certificate.trace_id, (number, trace, certificate))
        return problems

    def check_branches(self) -> Iterator[tuple[int, str]]:
        traces = {trace_id: trace for trace_id, (_, trace, _) in self._tree_rows.items()}
        for number, trace, certificate in self._tree_rows.values():
            if trace.parent_trace_id is None:
                continue
            try:
                before = trace_path(trace, traces).token_ids[: trace.branch_at]
            except ValueError:
                yield number, f"its parent {trace.parent_trace_id} is not in this file, or its row is bad"
                continue
            if hash_tokens(before) != certificate.branch_hash:
                yield number, f"its parent {trace.parent_trace_id} has other tokens before the branch"


def main(arguments: list[str] | None = None) -> int:
    """Run the check. Exit code 0: no row has a problem; 1: a row has a problem; 2: the file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m polar_proxy.traces.check", description=__doc__)
    parser.add_argument("file", nargs="?", help="a tokens-jsonl export; - is standard input")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of certificates and exit")
    options = parser.parse_args(arguments)
    if options.schema:
        print(orjson.dumps(Certificate.model_json_schema(), option=orjson.OPT_INDENT_2).decode())
        return 0
    if options.file is None:
        parser.error("name the file to check, or - for standard input")
    try:
        if options.file == "-":
            checked = check_lines(sys.stdin.buffer)
        else:
            with Path(options.file).open("rb") as lines:
                checked = check_lines(lines)
    except OSError as error:
        print(f"error: cannot read {options.file}: {error.strerror}", file=sys.stderr)
        return 2
    if options.json:
        print(escape_json_controls(orjson.dumps(checked, option=orjson.OPT_INDENT_2).decode()))
    else:
        for bad in checked.bad:
            more = len(bad.problems) - _PROBLEMS_SHOWN
            shown = "; ".join(bad.problems[:_PROBLEMS_SHOWN]) + (f" (and {more} more)" if more > 0 else "")
            print(one_line(f"{options.file}:{bad.line}: {bad.trace_id or 'row'}: {shown}", limit=4000))
        print(f"{checked.rows} rows, {len(checked.bad)} bad", file=sys.stderr)
    return 1 if checked.bad else 0


if __name__ == "__main__":
    sys.exit(main())
