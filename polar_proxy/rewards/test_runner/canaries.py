"""Canaries: tests that always fail. They expose a child process that forges the verdicts of the tests it runs.

The names and bodies of canaries look like those of other tests. If a canary passes in a child, or the child does not
report each canary exactly once, the verdicts of this child are forged.
"""

from __future__ import annotations

import random
import sys
from typing import Any

_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_ASSERT = (
    "assert {low} == {high}",
    "assert '{word}' in ['{other}']",
    "assert [{low}, '{word}'] == [{low}, '{other}']",
    "assert object() == object()",
    "assert isinstance('{word}', int)",
    "assert not {low}",
    "raise ValueError('{word}')",
    "raise AssertionError('{word}')",
)
_UNITTEST = (
    *_ASSERT,
    "self.assertEqual({low}, {high})",
    "self.assertEqual([{low}, '{word}'], [{low}, '{other}'])",
    "self.assertEqual({{'{word}': {low}}}, {{'{word}': {high}}})",
    "self.assertEqual('{word}', '{other}')",
    "self.assertEqual(('{word}',), ('{other}',))",
    "self.assertEqual(object(), object())",
    "self.assertNotEqual({low}, {low})",
    "self.assertTrue({low} == {high})",
    "self.assertFalse({low} < {high})",
    "self.assertIs(object(), None)",
    "self.assertIsNone('{word}')",
    "self.assertIsNotNone(None)",
    "self.assertIn({low}, [{high}])",
    "self.assertNotIn({low}, [{low}])",
    "self.assertIsInstance('{word}', int)",
    "self.assertGreater({low}, {high})",
    "self.assertAlmostEqual({low}.25, {high}.5)",
    "self.assertRegex('{word}', '^{other}$')",
    "self.assertCountEqual([{low}], [{high}])",
    "self.assertRaises(ValueError, int, '{low}')",
    "with self.assertRaises(KeyError): str({high})",
    "self.fail('{word}')",
)
_PYTEST = (
    *_ASSERT,
    "with __import__('pytest').raises(ValueError): int('{low}')",
    "assert {low} == __import__('pytest').approx({high})",
)


def make_canaries(style: str) -> list[dict[str, str]]:
    """Return canaries in random order, each as a class name (`group`), a function name (`name`) and its `body`."""
    rng = random.SystemRandom()
    values = {"low": rng.randrange(2, 500), "high": rng.randrange(500, 1000), "word": _name(rng, 2)}
    bodies = [body.format(**values, other=_name(rng, 3)) for body in (_PYTEST if style == "pytest" else _UNITTEST)]
    rng.shuffle(bodies)
    return [{"group": "Test" + _name(rng, 3).title(), "name": "test_" + _name(rng, 5), "body": body} for body in bodies]


def _name(rng: random.Random, syllables: int) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(syllables))


def judge_child(child: dict[str, Any], canaries: list[dict[str, str]]) -> tuple[dict[str, str], set[str]]:
    """Return the verdicts that a child process reported for its tests, and all signs of forgery.

    If the child did not end by itself, all verdicts are `error`.
    """
    events = child["events"]
    tests = [event for event in events if event[0] == "test"]
    verdicts: dict[str, str] = {name: verdict for _, name, verdict in tests}
    kinds = [event[0] for event in events]
    if child["status"] != 0 or kinds[-1:] != ["end"] or kinds.count("end") != 1:
        print(f"a group of tests did not end by itself (status {child['status']})", file=sys.stderr)
        return dict.fromkeys(verdicts, "error"), set()
    signs = set(events[-1][1])
    wanted = {canary["name"] for canary in canaries}
    found = {name: verdict for name, verdict in verdicts.items() if _function(name) in wanted}
    all_failed = all(verdict in ("failed", "error") for verdict in found.values())
    if len(found) != len(wanted) or len(tests) != len(verdicts) or not all_failed:
        signs.add("canary_passed")
    return {name: verdict for name, verdict in verdicts.items() if name not in found}, signs


def _function(test: str) -> str:
    """Return the name of the function in a test id of unittest or pytest."""
    return test.rpartition("::" if "::" in test else ".")[2]
