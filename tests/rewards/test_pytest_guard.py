"""Tasks whose command runs pytest: the plugin that watches it changes nothing for honest code and finds forgery."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from polar_proxy.rewards import EvaluationInput, HiddenTestsEvaluator, Score, SwebenchEvaluator, evaluate
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
PYTEST = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider")
"""Without the plugins of the developers' environment, which the guard would have Python compile for each run."""
COMMAND = (*PYTEST, "tests/test_shop.py")
PRINTED = "".join(f"PASSED {name}\\n" for name in NAMES)
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""


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
    return replace(plain, hidden_files={}, evaluators=(SwebenchEvaluator(command=" ".join(COMMAND)),))


async def score(kind: str, shop: str, **more: str) -> Score:
    sandboxes = TaskSandboxes("process")
    files = {"shop.py": shop, **{name.replace("__", "."): text for name, text in more.items()}}
    work = EvaluationInput(task(kind), new_files(files))
    return await evaluate(work, lambda: sandboxes.fresh(task(kind), {}))


@pytest.mark.parametrize("kind", ["tests", "swebench"])
async def test_honest_code_gets_what_it_earns(kind: str) -> None:
    right = await score(kind, RIGHT)
    assert (right.reward, right.detail.get("signs")) == (1.0, None), right.log.decode()
    assert b"3 passed" in right.log  # the canaries are not counted
    wrong = await score(kind, WRONG)
    assert (wrong.reward, wrong.detail["missed"], wrong.detail.get("signs")) == (0.0, list(NAMES), None)


@pytest.mark.parametrize("kind", ["tests", "swebench"])
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
    ],
)
async def test_forged_verdicts_score_0(kind: str, code: str, sign: str | None) -> None:
    forged = await score(kind, WRONG + code)
    assert forged.reward == 0.0
    assert sign is None or sign in forged.detail["signs"]


@pytest.mark.parametrize("kind", ["tests", "swebench"])
async def test_hooks_and_settings_of_the_patch_give_nothing(kind: str) -> None:
    hooked = await score(kind, WRONG, conftest__py=HOOK)
    assert (hooked.reward, "canary_passed" in hooked.detail["signs"]) == (0.0, True)
    plugin = f"import os\nos.write(1, b'''\\n{PRINTED}''')\nos._exit(0)\n"
    early = await score(kind, WRONG, cheat__py=plugin, pytest__ini="[pytest]\naddopts = -p cheat\n")
    assert (early.reward, "canary_passed" in early.detail["signs"]) == (0.0, True)
    honest = await score(kind, RIGHT, conftest__py="import pytest\n", setup__cfg="[metadata]\nname = shop\n")
    assert honest.reward == 1.0
