"""Reading what ``python -m unittest -v`` prints.

The verdict of a test may stand on the line of its name or, when the test itself printed something, on a later
one. The ids are unittest's own dotted ids (``tests.test_x.TestX.test_y``), the same for Python 3.10, which
prints ``test_y (tests.test_x.TestX)``, and for later versions, which print the whole id in the brackets.
"""

from __future__ import annotations

import re
from typing import Literal

Verdict = Literal["passed", "failed", "error", "skipped", "xfailed"]

_START = re.compile(r"^(?P<method>\w+) \((?P<where>[\w.]+)\)(?P<rest>.*)$")
_VERDICT = re.compile(
    r"(?:^|\.\.\. )(?:(?P<ok>ok|unexpected success)|(?P<fail>FAIL)|(?P<error>ERROR)"
    r"|(?P<skip>skipped .*|expected failure))$"
)


def parse_unittest(output: str) -> dict[str, Verdict]:
    """Return test id -> verdict from the verbose output (stdout and stderr in any order of streams).

    A test that started and has no verdict (the process died in it) counts as ``error``.
    """
    verdicts: dict[str, Verdict] = {}
    current: str | None = None
    for line in output.splitlines():
        # Behind the first rule come tracebacks, whose headings repeat the names.
        if line.startswith("=" * 70):
            break
        if start := _START.match(line):
            method, where = start["method"], start["where"]
            current = where if where.rpartition(".")[2] == method else f"{where}.{method}"
            verdicts[current] = "error"
            line = start["rest"]
        if current is None or not (match := _VERDICT.search(line)):
            continue
        if match["ok"]:
            verdicts[current] = "passed" if match["ok"] == "ok" else "failed"
        elif match["fail"]:
            verdicts[current] = "failed"
        elif match["skip"]:
            verdicts[current] = "skipped"
        current = None
    return verdicts
