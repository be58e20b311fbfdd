"""The built-in family `swe-task`: a small repository, one wrong return line, and a bug report about it.

All names are made of random syllables and all numbers are random, so an instance can only be solved by reading: the
report gives the function's name and the formula, the repository gives the file and the parameter names. Everything
else (ordinary Python, `unittest`, the standard library) is the same in every instance.

Seeds 0 to 99,999 are for users and for evaluation; seeds from 1,000,000 are for training data. With this split, no
policy is evaluated on an instance that it was trained on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from polar_proxy.rewards import HiddenTestsEvaluator
from polar_proxy.tasks.task import Task

TRAIN_SEEDS = range(1_000_000, 1_000_000_000)

SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
"""The syllables of all generated names."""

# Words made of these syllables that are Python modules or folders of the generated repository.
_RESERVED = frozenset({"base", "decimal", "locale", "site", "time", "timeit", "token", "tokenize", "wave"})

_REPORTS = (
    "`{name}` gives wrong results: `{name}(x, y)` should return `{formula}`.",
    "The function `{name}` is broken. It must compute `{formula}` from its arguments x and y.",
    "Bug in `{name}`: its arguments x and y should give `{formula}`, but they do not.",
    "Please correct `{name}`, which has to return `{formula}` for its arguments x and y.",
)


@dataclass(frozen=True)
class Formula:
    """``first op1 second op2 value`` over the two parameters of a function; if `swapped`, ``second op1 first ...``."""

    op1: str
    op2: str
    value: int
    swapped: bool

    def text(self, first: str, second: str) -> str:
        """Return the formula as Python source, given the names of the first and the second parameter."""
        left, right = (second, first) if self.swapped else (first, second)
        return f"{left} {self.op1} {right} {self.op2} {self.value}"

    def __call__(self, first: int, second: int) -> int:
        left, right = (second, first) if self.swapped else (first, second)
        core = {"+": left + right, "-": left - right, "*": left * right, "%": left % right}[self.op1]
        return core + self.value if self.op2 == "+" else core - self.value


@dataclass(frozen=True)
class GeneratedFunction:
    name: str
    first: str
    second: str
    formula: Formula

    def source(self) -> str:
        body = self.formula.text(self.first, self.second)
        return f"def {self.name}({self.first}, {self.second}):\n    return {body}\n"


def _names(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield pairs without end: a name of three syllables and a name of two. No name comes twice."""
    seen = set(_RESERVED)
    while True:
        syllables = [rng.choice(SYLLABLES) for _ in range(5)]
        long, short = "".join(syllables[:3]), "".join(syllables[3:])
        if long in seen or short in seen:
            continue
        seen.update((long, short))
        yield long, short


def _formula(rng: random.Random) -> Formula:
    return Formula(rng.choice("+-*%"), rng.choice("+-"), rng.randrange(11, 100), rng.random() < 0.3)


def _broken(rng: random.Random, right: Formula) -> Formula:
    """Return `right` with its `op1`, its `value` or both changed. Nearly all results of this formula are wrong."""
    wrong = replace(right, value=rng.randrange(11, 100)) if rng.random() < 0.6 else right
    if wrong == right or rng.random() < 0.4:
        wrong = replace(wrong, op1=rng.choice([op for op in "+-*%" if op != right.op1]))
    return wrong


def _cases(rng: random.Random, right: Formula, wrong: Formula, count: int) -> list[tuple[int, int]]:
    """Return `count` distinct pairs of arguments for which the formulas `right` and `wrong` give different results."""
    cases: list[tuple[int, int]] = []
    while len(cases) < count:
        pair = (rng.randrange(2, 60), rng.randrange(2, 60))
        if pair not in cases and right(*pair) != wrong(*pair):
            cases.append(pair)
    return cases


def _test_module(package: str, module: str, tests: list[tuple[str, list[tuple[int, int, int]]]]) -> str:
    """Return the source of a unittest module.

    `tests`: the name of each tested function, with a list of (first argument, second argument, expected result).
    """
    lines = ["import unittest", "", f"from {package} import {module}", "", ""]
    lines.append("class Test(unittest.TestCase):")
    for name, rows in tests:
        lines.append(f"    def test_{name}(self):")
        lines += [f"        self.assertEqual({module}.{name}({a}, {b}), {want})" for a, b, want in rows]
        lines.append("")
    return "\n".join(lines)


def _module_source(functions: list[GeneratedFunction]) -> str:
    return "\n\n".join(function.source() for function in functions)


@dataclass(frozen=True)
class GeneratedInstance:
    """A repository with one broken function, its bug report and its tests."""

    package: str
    modules: dict[str, list[GeneratedFunction]]
    broken_module: str
    broken_index: int
    """Position of the broken function in its module."""
    solution: list[GeneratedFunction]
    """The functions of the broken module after the fix."""
    report: str
    cases: list[tuple[int, int]]
    """Arguments for which the broken function gives a wrong result."""
    other_cases: list[tuple[int, int]]
    """Arguments with which the tests call the other functions of the module."""

    @property
    def path(self) -> str:
        """Path of the broken module."""
        return f"{self.package}/{self.broken_module}.py"

    def tests(self, visible: bool) -> str:
        """Return the tests of the broken module. `visible`: the repository's own tests, with one case for each
        function. Otherwise: the hidden tests, with all cases."""
        tests = []
        for index, function in enumerate(self.solution):
            cases = self.cases if index == self.broken_index else self.other_cases
            rows = [(a, b, function.formula(a, b)) for a, b in (cases[:1] if visible else cases)]
            tests.append((function.name, rows))
        return _test_module(self.package, self.broken_module, tests)


def _build(seed: int) -> GeneratedInstance:
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    # Increase the number when the generator changes its instances.
    rng = random.Random(f"swe-task/4/{seed}")
    names = _names(rng)
    package, _ = next(names)
    modules: dict[str, list[GeneratedFunction]] = {}
    for _ in range(2):
        module, _ = next(names)
        modules[module] = []
        for _ in range(rng.randrange(2, 4)):
            (name, first), (_, second) = next(names), next(names)
            modules[module].append(GeneratedFunction(name, first, second, _formula(rng)))
    broken_module = rng.choice(sorted(modules))
    solution = list(modules[broken_module])
    index = rng.randrange(len(solution))
    right = _formula(rng)
    wrong = _broken(rng, right)
    solution[index] = replace(solution[index], formula=right)
    modules[broken_module][index] = replace(solution[index], formula=wrong)
    cases = _cases(rng, right, wrong, 4)
    others = [(rng.randrange(2, 60), rng.randrange(2, 60)) for _ in range(3)]
    report = rng.choice(_REPORTS).format(name=solution[index].name, formula=right.text("x", "y"))
    return GeneratedInstance(package, modules, broken_module, index, solution, report, cases, others)


class SweTaskSource:
    name = "swe-task"

    def task(self, seed: int) -> Task:
        """Return instance `seed`; the module docstring says which seeds are for evaluation and for training."""
        instance = _build(seed)
        test_path = f"tests/test_{instance.broken_module}.py"
        test_module = f"tests.test_{instance.broken_module}"
        ids = [f"{test_module}.Test.test_{function.name}" for function in instance.solution]
        broken = instance.broken_index
        listing = "".join(f"* `{instance.package}/{module}.py`\n" for module in instance.modules)
        files = {
            ".gitignore": "__pycache__/\n",
            "README.md": f"# {instance.package}\n\n{listing}",
            f"{instance.package}/__init__.py": "",
            "tests/__init__.py": "",
            test_path: instance.tests(visible=True),
        }
        for module, functions in instance.modules.items():
            files[f"{instance.package}/{module}.py"] = _module_source(functions)
        return Task(
            task_id=f"swe-task-{seed}",
            family=self.name,
            seed=seed,
            instruction=instance.report,
            files=files,
            hidden_files={"tests/__init__.py": "", test_path: instance.tests(visible=False)},
            test_command=("python3", "-m", "unittest", "-v", test_module),
            fail_to_pass=(ids[broken],),
            pass_to_pass=(*ids[:broken], *ids[broken + 1 :]),
            timeout_seconds=60.0,
            evaluators=(HiddenTestsEvaluator(by_value=True),),
            metadata={
                "path": instance.path,
                "function": instance.solution[broken].name,
                "split": "train" if seed >= TRAIN_SEEDS.start else "eval",
            },
        )

    def solution(self, seed: int) -> dict[str, str]:
        """Return the files that a correct fix changes, as they are after the fix: text by path."""
        instance = _build(seed)
        return {instance.path: _module_source(instance.solution)}
