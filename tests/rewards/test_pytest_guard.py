"""Tasks whose command runs pytest, by Polar's own runner (`tests`) or with a plugin that watches it (`swebench`):
honest code gets what it earns, and forgery is found."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from polar_proxy.rewards import EvaluationInput, HiddenTestsEvaluator, Score, SwebenchEvaluator, evaluate
from polar_proxy.rewards.isolated import plan_pytest
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.tasks import Task
from tests.rewards.test_isolated_tests import new_files

pytestmark = pytest.mark.slow

TEST = """
import pytest
from shop import price

@pytest.fixture(scope="module")
def made(): return []

@pytest.mark.parametrize("count", [1, 2])
def test_price(made, count):
    made.append(count)
    assert len(made) == count
    assert price(count, 3) == count * 3

def test_error():
    with pytest.raises(ValueError):
        price(-1, 3)
"""
RIGHT = """
def price(count, each):
    if count < 0:
        raise ValueError(count)
    return count * each
"""
WRONG = "def price(count, each): return 0\n"
NAMES = ("tests/test_shop.py::test_price[1]", "tests/test_shop.py::test_price[2]", "tests/test_shop.py::test_error")
COMMAND = (sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "tests/test_shop.py")
KINDS = ["tests", pytest.param("swebench", marks=pytest.mark.full)]
"""Each run of the command `swebench` takes a second, because Python compiles pytest: it uses no bytecode it finds."""
WITHOUT_PLUGINS = "env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
"""A given command loads no plugins of the developers' environment, which Python would compile for each run."""
PRINTED = "".join(f"PASSED {name}\\n" for name in NAMES)
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""

CHOOSY = f"""
class Cheat:
    def pytest_pyfunc_call(self, pyfuncitem):
        return True if pyfuncitem.nodeid in {NAMES} else None
"""
"""Lets the known tests pass without running them; canaries fail as they should."""
REGISTER = "import gc, pluggy\n[m.register(Cheat()) for m in gc.get_objects() if isinstance(m, pluggy.PluginManager)]\n"


def task(kind: str) -> Task:
    plain = Task(
        task_id="shop-1",
        family="own",
        seed=0,
        instruction="Correct the shop.",
        files={"README.md": "A shop.\n", "tests/test_shop.py": TEST},
        hidden_files={"tests/test_shop.py": TEST},
        test_command=COMMAND,
        fail_to_pass=NAMES,
        timeout_seconds=60,
        evaluators=(HiddenTestsEvaluator(parser="pytest"),),
    )
    if kind == "tests":
        return plain
    return replace(
        plain, hidden_files={}, evaluators=(SwebenchEvaluator(command=" ".join((WITHOUT_PLUGINS, *COMMAND))),)
    )


async def score(kind: str, shop: str, other_task: Task | None = None, **more: str) -> Score:
    given = other_task or task(kind)
    sandboxes = TaskSandboxes("process")
    files = {"shop.py": shop, **{name.replace("__", "."): text for name, text in more.items()}}
    work = EvaluationInput(given, new_files(files))
    return await evaluate(work, lambda: sandboxes.fresh(given, {}))


@pytest.mark.parametrize("kind", ["tests", "swebench"])
async def test_honest_code_gets_what_it_earns(kind: str) -> None:
    right = await score(kind, RIGHT)
    assert (right.reward, right.detail.get("signs")) == (1.0, None), right.log.decode()
    assert b"3 passed" in right.log  # the canaries are not counted
    wrong = await score(kind, WRONG)
    assert (wrong.reward, wrong.detail["missed"], wrong.detail.get("signs")) == (0.0, list(NAMES), None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("code", "sign"),
    [
        (f"import os\nos.write(1, b'''\\n{PRINTED}''')\nos._exit(0)", "canary_passed"),
        (f"import atexit, os\natexit.register(lambda: os.write(1, b'''\\n{PRINTED}'''))", None),
        ("import _pytest.runner\n_pytest.runner.CallInfo.from_call = classmethod(lambda *a, **k: None)", None),
        (
            "import builtins\nclass Nothing(BaseException): pass\nbuiltins.AssertionError = Nothing",
            "changes_assertions",
        ),
        ("class Any:\n    def __eq__(self, other): return True\nprice = lambda *a: Any()", "equals_everything"),
        ("import pytest\nprice = lambda *a: pytest.skip('solved')", None),
        ("import pytest\nprice = lambda *a: pytest.xfail('solved')", None),
        (CHOOSY + REGISTER, "changes_test_runner"),
        ("import _pytest.outcomes\ndef price(*a): raise _pytest.outcomes.XFailed('solved')", None),
    ],
)
async def test_forged_verdicts_score_0(kind: str, code: str, sign: str | None) -> None:
    forged = await score(kind, WRONG + code)
    assert forged.reward == 0.0
    # A child that ends early has no verdicts, so there is nothing that was forged.
    assert sign is None or sign in forged.detail["signs"] or (kind == "tests" and "_exit" in code)


@pytest.mark.parametrize("kind", KINDS)
async def test_hooks_and_settings_of_the_patch_give_nothing(kind: str) -> None:
    for hooks in (HOOK, CHOOSY + "pytest_pyfunc_call = Cheat().pytest_pyfunc_call\n"):
        hooked = await score(kind, WRONG, conftest__py=hooks)
        assert hooked.reward == 0.0
        loaded = await score(kind, WRONG, cheat__py=hooks, pytest__ini="[pytest]\naddopts = -p cheat\n")
        assert (loaded.reward, "changes_test_runner" in loaded.detail["signs"]) == (0.0, True)
    plugin = f"import os\nos.write(1, b'''\\n{PRINTED}''')\nos._exit(0)\n"
    early = await score(kind, WRONG, cheat__py=plugin, pytest__ini="[pytest]\naddopts = -p cheat\n")
    assert (early.reward, "canary_passed" in early.detail["signs"]) == (0.0, kind == "swebench")
    shadow = {"unittest/__init__.py": plugin.replace("os.write", "os.path.exists('tests') and os.write")}
    assert (await score(kind, WRONG, **shadow)).reward == 0.0
    entry = {"cheat-1.dist-info/METADATA": "Name: cheat\nVersion: 1\n"}
    entry["cheat-1.dist-info/entry_points.txt"] = "[pytest11]\ncheat = cheat\n"
    installed = await score(kind, WRONG, cheat__py=HOOK, **entry)
    assert installed.reward == 0.0
    honest = await score(kind, RIGHT, conftest__py="import pytest\n", setup__cfg="[metadata]\nname = shop\n")
    assert honest.reward == 1.0


async def test_the_runner_loads_no_plugin_that_the_task_does_not_name() -> None:
    files = {
        **task("tests").files,
        "own_plugin.py": "def pytest_configure(config): print('the plugin was loaded')\n",
        "own-1.dist-info/METADATA": "Name: own\nVersion: 1\n",
        "own-1.dist-info/entry_points.txt": "[pytest11]\nown = own_plugin\n",
    }
    plain = await score("tests", RIGHT, replace(task("tests"), files=files))
    assert (plain.reward, b"the plugin was loaded" in plain.log) == (1.0, False)
    asked = await score(
        "tests", RIGHT, replace(task("tests"), files=files, test_command=(*COMMAND, "-p", "own_plugin"))
    )
    assert (asked.reward, b"the plugin was loaded" in asked.log) == (1.0, True)


async def test_each_file_runs_in_a_child_of_its_own() -> None:
    """What the code does to one process does not reach the tests of another file."""
    second = "from other import value\ndef test_value(): assert value == 1\n"
    names = ("tests/test_other.py::test_value",)
    files = {"tests/test_shop.py": TEST, "tests/test_other.py": second}
    both = replace(
        task("tests"), hidden_files=files, test_command=(*COMMAND, "tests/test_other.py"), fail_to_pass=(*NAMES, *names)
    )
    other = "import os, sys\nvalue = 1 if 'shop' not in sys.modules else 0\n"
    done = await score("tests", RIGHT, both, other__py=other)
    assert done.reward == 1.0, done.log.decode()
    ended = await score("tests", RIGHT + "import os\nos._exit(0)\n", both, other__py=other)
    assert (ended.reward, ended.detail["missed"]) == (0.0, list(NAMES))


def test_plans_only_commands_whose_options_are_known() -> None:
    plan = plan_pytest(("python3", "-m", "pytest", "-rA", "-p", "x", "a.py", "b.py::test_b", "--tb=no", "a.py::T::t"))
    assert plan is not None
    assert plan.groups == (("a.py", "a.py::T::t"), ("b.py::test_b",))
    assert plan.options == ("-rA", "-p", "x", "--tb=no")
    for command in (("pytest", "a.py"), ("python3", "-m", "pytest", "-n", "4", "a.py"), ("python3", "-m", "pytest")):
        assert plan_pytest(command) is None
