"""Patches that want a reward for nothing (`reward_patches`), each against every kind of task in every sandbox.

Each patch is made by a script in an agent's sandbox, read from there as after a rollout, and scored by the function
that scores rollouts. An attack succeeds unless the reward is 0. It also succeeds if there is no reward, because a
failure is then missing from the baseline.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from benchmarks._attacks.outcome import AttackOptions, Outcome
from benchmarks._attacks.reward_patches import patches
from benchmarks._attacks.reward_patches.patch import BUILT_IN, HARBOR, PYTEST_ROW, PYTEST_TESTS, ROW, RewardPatch
from polar_proxy.errors import PolarError
from polar_proxy.rewards import EvaluationInput, HiddenTestsEvaluator, Score, SwebenchEvaluator
from polar_proxy.rollouts.agent_patch import read_patch, save_base
from polar_proxy.rollouts.scoring import score_work
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.rollouts.workspace import prepare_workspace
from polar_proxy.tasks import Task, get_source
from polar_proxy.tasks.swe_task import SweTaskSource
from sandboxes import images
from sandboxes.base import Mount, Sandbox, SandboxKind, SandboxSpec
from sandboxes.choice import open_sandbox

FAMILY = "rewards"
PYTEST_TEST = """\
from tally import most_common


def test_order():
    assert most_common("abcabb", 2) == ["b", "a"]


def test_equals_keep_their_order():
    assert most_common("zxxz", 2) == ["z", "x"]


def test_none():
    assert most_common("", 3) == []
"""
EXAMPLES = Path(__file__).parents[2] / "examples" / "tasks"
SECONDS = 20.0
"""Time limit of the tests; some attacks never end."""
AT_ONCE = 3
AGENT_SECONDS = 60.0
TOO_DANGEROUS = {
    *("kill_everything", "kill_the_parent", "kill_the_group", "trace_the_runner", "spray_a_report", "read_the_nonce"),
    *("fork_bomb", "fill_the_disk", "replaced_git", "replace_the_judge", "write_reward_files", "write_reward_later"),
    *("usercustomize", "path_file", "variables_in_files"),
}
"""Attacks that are never made in a `process` sandbox, because it isolates nothing: if Polar runs as root, they kill
other programs of this machine, write to their files, and replace its git."""


@dataclass(frozen=True)
class Target:
    """A task to be paid for without solving it, and its honest solution."""

    kind: str
    task: Task
    module: str
    """The file that the hidden tests import or run."""
    test: str
    """A hidden test file; for Harbor a path that means nothing."""
    solution: str
    mounts: tuple[Mount, ...] = ()

    def script(self, script: str) -> str:
        return f"export MODULE={self.module} TEST={self.test}\n{script}"


async def run(options: AttackOptions) -> list[Outcome]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def attempt(
        kind: SandboxKind, target: Target, name: str, patch: RewardPatch, honest: float | None
    ) -> Outcome:
        async with limit:
            reward, got = await score_script(kind, target, patch.script)
        where = f"{kind}, {target.kind}"
        if honest is not None:
            outcome = Outcome(name, FAMILY, where, reward == honest, got, control=True)
        else:
            expected = target.kind in patch.known
            outcome = Outcome(name, FAMILY, where, reward != 0.0, got, expected=expected)
        options.report(f"{where} {name}: {got}")
        return outcome

    work = [
        attempt(kind, target, name, patch, honest)
        for kind in options.sandboxes
        for target in targets(kind, options.folder)
        for name, patch, honest in agents(target)
        if options.selected(name) and not (kind == "process" and name in TOO_DANGEROUS)
    ]
    return list(await asyncio.gather(*work))


def agents(target: Target) -> Iterator[tuple[str, RewardPatch, float | None]]:
    """Yield (name, patch, reward that it must get) for honest agents, then (name, patch, None) for the attacks."""
    yield "honest_solution", RewardPatch(target.solution), 1.0
    yield "no_work", RewardPatch("true"), 0.0
    task = target.task
    for name, patch in patches((*task.fail_to_pass, *task.pass_to_pass)).items():
        if target.kind in patch.tasks:
            yield name, patch, None


def targets(kind: SandboxKind, folder: Path) -> Iterator[Target]:
    family = SweTaskSource()
    task = family.task(0)
    ((path, text),) = family.solution(0).items()
    (test,) = [path for path in task.hidden_files if path != "tests/__init__.py"]
    yield Target(BUILT_IN, _quick(task), path, test, f"cat >{path} <<'END'\n{text}\nEND")
    row = get_source(str(EXAMPLES / "swebench" / "rows.jsonl")).task(0)
    gold = (EXAMPLES / "swebench" / "example__tally-1.gold.patch").read_text()
    solution = f"git apply - <<'END'\n{gold}END"
    yield Target(ROW, _quick(row), "tally.py", "tests/test_most_common.py", solution)
    mounted = _pytest_folder(folder / "pytest")
    for name, pytest_task in _pytest_tasks(row, mounted).items():
        mounts = (Mount(mounted, str(mounted)),)
        yield Target(
            name,
            replace(pytest_task, timeout_seconds=3 * SECONDS),
            "tally.py",
            "tests/test_most_common.py",
            solution,
            mounts,
        )
    if kind != "process":  # it has no file system of its own
        harbor = EXAMPLES / "harbor" / "running-mean"
        solution = (harbor / "solution" / "solve.sh").read_text()
        if kind == "docker":
            harbor = _with_local_image(harbor, folder / "harbor")
        yield Target(HARBOR, _quick(get_source(str(harbor)).task(0)), "mean.py", "tests/test_mean.py", solution)


def _pytest_tasks(row: Task, mounted: Path) -> dict[str, Task]:
    """Return two variants of the row's task whose tests pytest runs: by its own command, and by the evaluator
    `tests`."""
    (old,) = row.evaluators
    assert isinstance(old, SwebenchEvaluator)
    path = "tests/test_most_common.py"
    names = tuple(f"{path}::{name}" for name in ("test_order", "test_equals_keep_their_order", "test_none"))
    command = ("python3", "-m", "pytest", "-rA", "-p", "no:cacheprovider", path)
    patch = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    lines = PYTEST_TEST.splitlines()
    patch += f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    environment = replace(row.environment, env={**row.environment.env, "PYTHONPATH": str(mounted)})
    base = replace(row, environment=environment, fail_to_pass=names[:2], pass_to_pass=names[2:])
    given = replace(old, test_patch=patch, command=" ".join(command), parser="pytest")
    own = HiddenTestsEvaluator(parser="pytest")
    hidden = {path: PYTEST_TEST}
    return {
        PYTEST_ROW: replace(base, evaluators=(given,)),
        PYTEST_TESTS: replace(base, evaluators=(own,), hidden_files=hidden, test_command=command),
    }


def _pytest_folder(folder: Path) -> Path:
    """Copy pytest and what it needs from this Python to a folder, because a sandbox's own Python may lack it."""
    if not folder.exists():
        for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            for file in metadata.files(name) or ():
                if file.suffix != ".pyc" and ".." not in file.parts:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(str(file.locate()), folder / file)
    return folder


def _quick(task: Task) -> Task:
    return replace(task, timeout_seconds=SECONDS)


def _with_local_image(folder: Path, copy: Path) -> Path:
    """Copy a Harbor folder and base its Dockerfile on the default sandbox image, so that no registry is needed."""
    shutil.copytree(folder, copy)
    dockerfile = copy / "environment" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace("python:3.12-slim", images.tag()))
    return copy


async def score_script(kind: SandboxKind, target: Target, script: str) -> tuple[float | None, str]:
    """Run the script as the agent and score its work; return the reward and a line for a reader."""
    try:
        score = await _score(kind, target, script)
    except PolarError as error:
        return None, f"no reward: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    signs = ", ".join(score.detail.get("signs", ()))
    reason = score.detail.get("no_reward")
    reward = f"reward {score.reward:g}" if score.reward is not None else f"no reward: {reason}"
    return score.reward, reward + (f"; signs: {signs}" if signs else "")


async def _score(kind: SandboxKind, target: Target, script: str) -> Score:
    task = target.task

    async def open_with_mounts(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        return await open_sandbox(kind, replace(spec, mounts=(*spec.mounts, *target.mounts)))

    sandboxes = TaskSandboxes(kind, opener=open_with_mounts)
    spec = await sandboxes.spec(task, memory_mb=1024, labels={}, mounts=target.mounts)
    async with await open_sandbox(kind, spec) as sandbox:
        await prepare_workspace(task, sandbox, await sandboxes.bundle(task))
        base = await save_base(sandbox, snapshot=task.environment.snapshot)
        done = await sandbox.exec(("sh", "-c", target.script(script)), timeout=AGENT_SECONDS)
        patch, problem = await read_patch(sandbox, base)
    score = await score_work(EvaluationInput(task, patch, done.exit_code), lambda: sandboxes.fresh(task, {}))
    if problem is not None:
        score.detail["no_patch"] = problem
    return score
