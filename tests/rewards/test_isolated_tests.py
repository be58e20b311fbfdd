"""Polar's own test runner: honest verdicts, and code under test that forges them, in its own process or by value."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.errors import BadTaskError
from polar_proxy.rewards import EvaluationInput, HiddenTestsEvaluator, Score, evaluate
from polar_proxy.rewards.isolated import TestPlan, plan_shell_command, plan_unittest, run_tests
from polar_proxy.rewards.test_runner.values import decode, encode
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.tasks import Task
from polar_proxy.tasks.task import check_task

pytestmark = pytest.mark.slow

HIDDEN = """
import unittest
from shop import price, names

class TestPrice(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(price(2, 3), 6)

    def test_error(self):
        with self.assertRaises(ValueError):
            price(-1, 3)

class TestNames(unittest.TestCase):
    def test_names(self):
        self.assertEqual(names({"b": 1, "a": 2}), ["a", "b"])
"""
RIGHT = """
def price(count, each):
    if count < 0:
        raise ValueError(count)
    return count * each

def names(table):
    return sorted(table)
"""
WRONG = "def price(count, each): return 0\ndef names(table): return []\n"
TESTS = ("tests.test_shop.TestPrice.test_sum", "tests.test_shop.TestPrice.test_error")
OTHER = ("tests.test_shop.TestNames.test_names",)
FORGERIES = {
    "canary_passed": [
        "import unittest\n"
        "for r in unittest.TestResult.__subclasses__(): r.addFailure = r.addError = lambda s, t, e: s.addSuccess(t)",
        "import gc, unittest\n"
        "for found in gc.get_objects():\n"
        "    if issubclass(type(found), unittest.TestResult):\n"
        "        found.addFailure = found.addError = lambda test, err, r=found: r.addSuccess(test)\n"
        "def _later(): pass",
    ],
    "changes_assertions": [
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None",
        "import unittest\ndef _same(self, first, second, msg=None): pass\n"
        "unittest.TestCase._baseAssertEqual.__code__ = _same.__code__",
        "import unittest\n_old = unittest.TestCase.assertEqual\n"
        "unittest.TestCase.assertEqual = lambda s, a, b: None if 'shop' in s.id() else _old(s, a, b)",
        "import builtins\nbuiltins.AssertionError = SystemExit",
    ],
    "equals_everything": [
        "class Any:\n    def __eq__(self, other): return True\nprice = names = lambda *a: Any()",
        "class Any(int):\n    def __eq__(self, other): return True\nprice = names = lambda *a: Any(1)",
        "class Any(type):\n    def __eq__(self, other): return True\nprice = names = lambda *a: Any('x', (), {})",
        "import unittest.mock\nprice = names = lambda *a: unittest.mock.ANY",
    ],
}
EARLY_ENDS = [
    "print('tests.test_shop.TestPrice.test_sum ... ok')\nimport os\nos._exit(0)",
    "raise SystemExit(0)",
    "import os\nprice = names = lambda *a: os._exit(0)",
    "import atexit, os\natexit.register(os._exit, 0)",
    "import os\nos.kill(os.getppid(), 9)",
    "import unittest\ndef price(*a): raise unittest.SkipTest('solved')\nnames = price",
    "import unittest\nunittest.TestCase.__unittest_expecting_failure__ = True",
    "import os\nfor fd in range(3, 64):\n"
    '    try: os.write(fd, b\'["test", "tests.test_shop.TestPrice.test_sum", "passed"]\\n["end", []]\\n\')\n'
    "    except OSError: pass\n",
]


def shop_task(*, by_value: bool = False, hidden: str = HIDDEN) -> Task:
    return Task(
        task_id="shop-1",
        family="own",
        seed=0,
        instruction="Correct the shop.",
        files={"tests/__init__.py": "", "README.md": "A shop.\n"},
        hidden_files={"tests/__init__.py": "", "tests/test_shop.py": hidden},
        test_command=("python3", "-m", "unittest", "-v", "tests.test_shop"),
        fail_to_pass=TESTS,
        pass_to_pass=OTHER,
        timeout_seconds=30,
        evaluators=(HiddenTestsEvaluator(by_value=by_value),),
    )


def new_files(files: Mapping[str, str]) -> bytes:
    """Return a git diff that adds these files."""
    text = ""
    for path, content in files.items():
        lines = content.splitlines()
        text += f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        text += f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    return text.encode()


async def score(shop: str, *, by_value: bool = False, hidden: str = HIDDEN, **more: str) -> Score:
    task = shop_task(by_value=by_value, hidden=hidden)
    sandboxes = TaskSandboxes("process")
    work = EvaluationInput(task, new_files({"shop.py": shop, **more}))
    return await evaluate(work, lambda: sandboxes.fresh(task, {}))


@pytest.mark.parametrize("by_value", [False, True])
async def test_honest_code_gets_what_it_earns(by_value: bool) -> None:
    assert (await score(RIGHT, by_value=by_value)).reward == 1.0
    half = await score(RIGHT.replace("count * each", "count + each"), by_value=by_value)
    assert (half.reward, half.detail["missed"], half.detail["broken"]) == (0.0, [TESTS[0]], [])
    broken = await score("def (", by_value=by_value)
    assert (broken.reward, broken.detail["missed"]) == (0.0, list(TESTS))
    assert b"SyntaxError" in broken.log


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize(
    ("sign", "forgery"),
    [(sign, code) for sign, codes in FORGERIES.items() for code in codes] + [(None, code) for code in EARLY_ENDS],
)
async def test_forged_verdicts_score_0(sign: str | None, forgery: str, by_value: bool) -> None:
    forged = await score(WRONG + forgery, by_value=by_value)
    assert forged.reward == 0.0
    # By value, a forgery reaches no verdict, so it leaves no sign.
    assert by_value or sign is None or sign in forged.detail["signs"]


async def test_a_forgery_in_one_group_discredits_the_others() -> None:
    hidden = HIDDEN.replace("from shop import price, names", "import os, shop\nfrom shop import price, names")
    forged = await score(RIGHT + FORGERIES["changes_assertions"][0], hidden=hidden)
    assert (forged.reward, forged.detail["missed"], forged.detail["broken"]) == (0.0, list(TESTS), list(OTHER))


async def test_ordinary_projects_show_no_sign() -> None:
    hidden = HIDDEN + (
        "\nfrom unittest import mock\n"
        "class TestOther(unittest.TestCase):\n"
        "    @classmethod\n"
        "    def setUpClass(cls): cls.made = getattr(cls, 'made', 0) + 1\n"
        "    def assertShop(self, value): self.assertTrue(value)\n"
        "    def assertEqual(self, first, second, msg=None): super().assertEqual(first, second, msg)\n"
        "    def test_mock(self):\n"
        "        with mock.patch('builtins.print') as printed: print(1)\n"
        "        printed.assert_called_once_with(mock.ANY)\n"
        "        self.assertEqual(self.made, 1)\n"
    )
    point = (
        "\nclass Point:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n"
    )
    honest = await score(RIGHT + point, hidden=hidden)
    assert (honest.reward, honest.detail.get("signs")) == (1.0, None)


async def test_the_workspace_cannot_stand_in_for_library_or_tests() -> None:
    cheat = "import os\nos._exit(0)\n"
    shadows = {"unittest/__init__.py": cheat, "json.py": cheat, "random.py": cheat, "sitecustomize.py": cheat}
    assert (await score(RIGHT, **shadows)).reward == 1.0
    assert (await score(WRONG, **shadows)).reward == 0.0


async def test_by_value_the_tested_code_never_sees_the_tests() -> None:
    spy = (
        "import gc, glob, sys\n"
        "def names(table):\n"
        "    name = 'test' + chr(95) + 'shop'\n"
        "    print('FILES', glob.glob('tests/*'), 'TESTS', [o for o in gc.get_objects() if name in str(o)])\n"
        "    print('FRAMES', [f for f in sys._current_frames().values() if 'unittest' in f.f_code.co_filename])\n"
        "    return sorted(table)\n"
    )
    seen = await score(RIGHT + spy, by_value=True)
    assert seen.reward == 1.0
    assert b"FILES ['tests/__init__.py'] TESTS []" in seen.log
    assert b"FRAMES []" in seen.log


async def test_by_value_only_plain_values_come_back() -> None:
    number = "\nclass Six(int): pass\n"
    assert (await score(RIGHT.replace("count * each", "Six(count * each)") + number, by_value=True)).reward == 0.0
    assert (await score(RIGHT.replace("count * each", "{} if each else object()"), by_value=True)).reward == 0.0


def test_by_value_needs_named_tests_of_unittest() -> None:
    task = shop_task(by_value=True)
    check_task(task)
    with pytest.raises(BadTaskError, match="by_value"):
        task.evaluators[0].check(SimpleNamespace(test_command=("pytest",), fail_to_pass=("x",), pass_to_pass=()))


@pytest.mark.parametrize(
    "output",
    [b"", b"0" * 64 + b'\n{"verdicts": {"t": "passed"}, "signs": []}', b'\n{"verdicts": {"t": "passed"}, "signs": []}'],
)
async def test_a_report_with_another_signature_gives_no_verdicts(output: bytes) -> None:
    async def answer(*arguments: object, **options: object) -> object:
        return SimpleNamespace(stdout=output, stderr=b"", exit_code=0, timed_out=False)

    plan = TestPlan("python3", "unittest", (("t",),))
    report = await run_tests(SimpleNamespace(exec=answer), plan, {}, (), 1.0)  # type: ignore[arg-type]
    assert report.verdicts == {}
    assert b"no report" in report.log


def test_plans_only_commands_that_it_can_replace() -> None:
    plan = TestPlan("python3", "unittest", (("tests.test_a",), ("tests.test_b.T.test_x",)))
    assert plan_unittest(("python3", "-m", "unittest", "-v", "tests.test_a", "tests.test_b.T.test_x")) == plan
    assert plan_shell_command("python3 -m unittest -v tests.test_a tests.test_b.T.test_x") == plan
    for command in (
        "python3 -m unittest",
        "python3 -m unittest discover -s tests",
        "python3 -m unittest -f tests.test_a",
        "python3 -W error -m unittest tests.test_a",
        "ruby -m unittest tests.test_a",
    ):
        assert plan_unittest(command.split()) is None
    for command in (
        "cd x && python3 -m unittest t",
        "python3 -m unittest t | tee log",
        "A=1 python3 -m unittest t",
        "'",
    ):
        assert plan_shell_command(command) is None


@pytest.mark.parametrize("python", ["python3.8", "python3.9", "python3.12"])
@pytest.mark.parametrize("style", ["values", "unittest"])
async def test_runs_on_other_versions_of_python(python: str, style: str) -> None:
    if shutil.which(python) is None:
        pytest.skip(f"install {python}")
    task = shop_task()
    async with TaskSandboxes("process").fresh(task, {}) as workspace:
        if (await workspace.exec((python, "-c", ""), timeout=30)).exit_code:
            pytest.skip(f"{python} does not run in a sandbox")
        await workspace.write_tree({"shop.py": RIGHT.encode(), "tests/test_shop.py": HIDDEN.encode()})
        plan = TestPlan(python, style, (("tests.test_shop",),))  # type: ignore[arg-type]
        report = await run_tests(workspace, plan, task.hidden_files, ("shop.py",), 30)
    assert dict(report.verdicts) == dict.fromkeys((*OTHER, *TESTS), "passed"), report.log.decode()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
)


@given(PLAIN)
def test_plain_values_survive_encoding(value: object) -> None:
    again = decode(encode(value))
    assert (again, type(again)) == (value, type(value))


def test_refuses_what_is_no_plain_value() -> None:
    for value in (object(), type("Text", (str,), {})("x"), [lambda: 1]):
        with pytest.raises(TypeError):
            encode(value)
    for message in ({"list": [], "tuple": []}, {"object": 1}, {"int": 1}, {"dict": [[{"list": []}, 1]]}):
        with pytest.raises((TypeError, KeyError)):
            decode(message)
