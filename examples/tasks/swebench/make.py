"""Make `tally.bundle` and `rows.jsonl`: a repository with a history, and rows over it as SWE-bench has them.

    python examples/tasks/swebench/make.py

Names and times are fixed, so that the commits are reproducible. Like a real repository it continues after the base
commits, with the fixes and a tag, which an agent must not find.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TALLY = '''"""Counting things."""


def count(items):
    """How often each item occurs."""
    counts = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def most_common(items, number=1):
    """The `number` most frequent items, most frequent first; of equals the one that came first."""
    counts = count(items)
    return sorted(counts, key=counts.get)[:number]
'''
SHARES = '''

def shares(items):
    """The part of the whole that each item makes up."""
    counts = count(items)
    return {item: amount / len(counts) for item, amount in counts.items()}
'''
TESTS = """import unittest

from tally import count


class TestCount(unittest.TestCase):
    def test_counts(self):
        self.assertEqual(count("abca"), {"a": 2, "b": 1, "c": 1})

    def test_nothing(self):
        self.assertEqual(count([]), {})
"""
TEST_MOST_COMMON = """import unittest

from tally import most_common


class TestMostCommon(unittest.TestCase):
    def test_order(self):
        self.assertEqual(most_common("abcabb", 2), ["b", "a"])

    def test_equals_keep_their_order(self):
        self.assertEqual(most_common("zxxz", 2), ["z", "x"])

    def test_none(self):
        self.assertEqual(most_common("", 3), [])
"""
TEST_SHARES = """
from tally import shares  # noqa: E402


class TestShares(unittest.TestCase):
    def test_they_make_one(self):
        self.assertEqual(shares("aab"), {"a": 2 / 3, "b": 1 / 3})
"""
COMMAND = "python3 -m unittest -v tests.test_count {extra}"


def git(folder: Path, *arguments: str, when: int = 0) -> str:
    env = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "Tally",
        "GIT_AUTHOR_EMAIL": "tally@example.org",
        "GIT_AUTHOR_DATE": f"2026-01-0{when + 1}T12:00:00Z",
        "GIT_COMMITTER_NAME": "Tally",
        "GIT_COMMITTER_EMAIL": "tally@example.org",
        "GIT_COMMITTER_DATE": f"2026-01-0{when + 1}T12:00:00Z",
    }
    done = subprocess.run(["git", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, message: str, when: int, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message, when=when)
    return git(folder, "rev-parse", "HEAD")


def make(target: Path) -> None:
    """Write the bundle, the rows and the gold patches to a folder."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        git(folder, "init", "-q", "-b", "main")
        sources = {"tally.py": TALLY, "tests/__init__.py": "", "tests/test_count.py": TESTS}
        base_1 = commit(folder, "Count items", 0, {**sources, ".gitignore": "__pycache__/\n"})
        right = TALLY.replace("key=counts.get)", "key=lambda item: -counts[item])")
        fix_1 = commit(
            folder,
            "most_common: most frequent first",
            1,
            {"tally.py": right, "tests/test_most_common.py": TEST_MOST_COMMON},
        )
        base_2 = commit(folder, "Shares of the whole", 2, {"tally.py": right + SHARES})
        wrong, good = "amount / len(counts)", "amount / sum(counts.values())"
        fix_2 = commit(
            folder,
            "shares: of all items, not of all kinds",
            3,
            {
                "tally.py": right + SHARES.replace(wrong, good),
                "tests/test_count.py": TESTS + "\n" + TEST_SHARES,
            },
        )
        git(folder, "tag", "v1.0")
        git(folder, "bundle", "create", "-q", str(target.absolute() / "tally.bundle"), "--all")

        def row(name: str, base: str, fix: str, statement: str, to_pass: list[str], others: list[str], extra: str):
            gold = git(folder, "diff", base, fix, "--", "tally.py") + "\n"
            (target / f"{name}.gold.patch").write_text(gold)
            return {
                "instance_id": name,
                "repo": "example/tally",
                "base_commit": base,
                "problem_statement": statement,
                "patch": gold,
                "test_patch": git(folder, "diff", base, fix, "--", "tests") + "\n",
                "FAIL_TO_PASS": json.dumps(to_pass),
                "PASS_TO_PASS": json.dumps(others),
                "version": "1.0",
                "test_command": COMMAND.format(extra=extra).strip(),
            }

        count = [f"tests.test_count.TestCount.{test}" for test in ("test_counts", "test_nothing")]
        common = "tests.test_most_common.TestMostCommon."
        rows = [
            row(
                "example__tally-1",
                base_1,
                fix_1,
                '`most_common("abcabb")` gives `["c"]`, the rarest letter, where its docstring promises the most '
                "frequent one. Of letters that are equally frequent the first should come first.",
                [common + "test_order"],
                [*count, common + "test_equals_keep_their_order", common + "test_none"],
                "tests.test_most_common",
            ),
            row(
                "example__tally-2",
                base_2,
                fix_2,
                '`shares("aab")` gives 1.0 for `a`. The shares of all items should add up to one.',
                ["tests.test_count.TestShares.test_they_make_one"],
                count,
                "",
            ),
        ]
    defaults = {"defaults": {"repository": "tally.bundle", "parser": "unittest", "timeout_seconds": 60}}
    (target / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (defaults, *rows)))


if __name__ == "__main__":
    make(HERE)
