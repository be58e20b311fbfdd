"""The judge: reads the job, lets the worker run the agent's code, and signs the report."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import sys
from typing import Any

from .links import Link, LinkClosedError, make_links, read_all, write_all

_PR_SET_DUMPABLE = 4


def main() -> None:
    """Fork the worker, read the job and the nonce, and write ``HMAC newline report`` to standard output."""
    report_fd = os.dup(1)
    os.dup2(2, 1)  # what tests print is a log for people
    sys.pycache_prefix = "/nonexistent"  # bytecode that the agent left is not read
    _hide_memory()
    ours, theirs = make_links()
    if os.fork() == 0:
        os.close(report_fd)
        ours.close()
        _replace_stdin()
        _work(theirs)
        os._exit(0)
    theirs.close()
    job = json.loads(read_all(0))
    nonce = bytes.fromhex(job.pop("nonce"))
    report = json.dumps(_judge(job, ours)).encode()
    write_all(report_fd, hmac.new(nonce, report, hashlib.sha256).hexdigest().encode() + b"\n" + report)


def _hide_memory() -> None:
    """Make memory and descriptors of this process and its forks unreadable for other processes of the same user."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (ImportError, OSError, AttributeError) as error:
        print("the test runner cannot hide its memory:", error, file=sys.stderr)


def _replace_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


# Each style loads only what it needs: most tests take less time than the imports.


def _work(link: Link) -> None:
    job = link.receive()
    if job["style"] == "values":
        from .values import serve_calls

        serve_calls(link)
    else:
        from .children import run_children

        run_children(job, link)


def _judge(job: dict[str, Any], link: Link) -> dict[str, Any]:
    if job["style"] == "values":
        from .values import run_tests_by_value

        link.send({"style": "values"})  # and nothing about the tests
        return run_tests_by_value(job, link)
    link.send(job)
    return _judge_groups(job, link)


def _judge_groups(job: dict[str, Any], link: Link) -> dict[str, Any]:
    """Let the worker run each group of tests in a child. A forgery in one child discredits the others, too."""
    from .canaries import judge_child, make_canaries

    verdicts: dict[str, str] = {}
    signs: set[str] = set()
    for tests in job["groups"]:
        canaries = make_canaries(job["style"])
        try:
            link.send({"tests": tests, "canaries": canaries})
            child = link.receive()
        except (LinkClosedError, OSError):  # the tested code killed the worker; the tests that are left have no verdict
            break
        found, found_signs = judge_child(child, canaries)
        verdicts.update(found)
        signs |= found_signs
    if signs:
        verdicts = dict.fromkeys(verdicts, "error")
    return {"verdicts": verdicts, "signs": sorted(signs)}
