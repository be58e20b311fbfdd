"""Harbor folders: what is read, what is refused, and what a Dockerfile says without docker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from polar_proxy.tasks import TaskList, get_source
from polar_proxy.tasks.dockerfile import read_dockerfile
from polar_proxy.tasks.evaluation import HarborEvaluator
from polar_proxy.tasks.task import BadTaskError

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tasks" / "harbor" / "running-mean"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE, tmp_path / "set" / "one")
    return tmp_path / "set" / "one"


def read(folder: Path) -> TaskList:
    found = get_source(str(folder))
    assert isinstance(found, TaskList)
    return found


def test_the_example() -> None:
    task = read(EXAMPLE).task(0)
    assert (task.task_id, task.family, task.agent_seconds, task.timeout_seconds) == (
        "polar/running-mean",
        "harbor",
        600,
        120,
    )
    assert task.instruction.startswith("`mean.py` prints")
    assert sorted(task.files) == ["mean.py", "numbers.txt"]
    environment = task.environment
    assert (environment.workdir, environment.folders, environment.memory_mb) == ("/app", ("/tests", "/logs"), 1024)
    assert not environment.needs_image
    # Neither tests nor solution are anywhere that the agent gets to see.
    (evaluation,) = task.evaluators
    assert isinstance(evaluation, HarborEvaluator)
    assert not any("judge" in text or "solve" in text for text in (*task.files, *task.files.values()))


def test_without_the_declaration_the_dockerfile_needs_docker(folder: Path) -> None:
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace("without_image = true", ""))
    task = read(folder).task(0)
    assert task.environment.needs_image
    assert task.environment.build == str(folder / "environment")
    assert task.files == {}


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("task.toml", "[task", "task.toml: "),
        ("task.toml", '[[steps]]\nname = "a"', "steps: several steps is not supported"),
        ("task.toml", "[environment]\ngpus = 1", "environment.gpus: GPUs is not supported"),
        ("task.toml", '[environment]\nos = "windows"', "only linux"),
        ("task.toml", '[environment]\nmemory = "much"', "is no size"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"', "separate is not supported"),
        ("task.toml", '[verifier.env]\nKEY = "${KEY}"', "takes a variable of the host"),
        ("task.toml", '[agent]\ntimeout_sec = "long"', "must be a number"),
        ("instruction.md", "", "instruction: is empty"),
        ("environment/docker-compose.yaml", "services:", "docker compose is not supported"),
        ("trajectory.json", "{}", "a conversation to go on with is not supported"),
    ],
)
def test_bad_folders_are_refused_and_the_others_run(folder: Path, file: str, text: str, words: str) -> None:
    other = folder.parent / "two"
    shutil.copytree(folder, other)
    (other / "task.toml").write_text('[task]\nname = "polar/two"\n')
    (folder / file).write_text(text)
    found = read(folder.parent)
    (refusal,) = found.refused
    assert refusal.where == "one"
    assert words in refusal.reason
    assert [found.task(seed).task_id for seed in found.seeds] == ["polar/two"]


def test_what_is_missing_is_named(folder: Path) -> None:
    for name in ("tests/test.sh", "environment/Dockerfile", "instruction.md"):
        (folder / name).rename(folder / "away")
        assert Path(name).name in read(folder).refused[0].reason
        (folder / "away").rename(folder / name)
    (folder / "task.toml").unlink()
    assert read(folder.parent).refused[0].reason == "task.toml: there is none"


def test_links_are_refused(folder: Path) -> None:
    (folder / "tests" / "link").symlink_to("/etc/passwd")
    assert "is a link" in read(folder).refused[0].reason


# ---------------------------------------------------------------- Dockerfiles


def layout(tmp_path: Path, text: str) -> object:
    (tmp_path / "src" / "deep").mkdir(parents=True, exist_ok=True)
    (tmp_path / "src" / "deep" / "a.py").write_text("a")
    (tmp_path / "run.sh").write_text("r")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "image.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "Dockerfile").write_text(text)
    found = read_dockerfile(tmp_path)
    return found.workdir, found.files, found.programs, found.env


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM x\nWORKDIR /a\nCOPY src .\n", ("/a", {"deep/a.py": "a"}, (), {})),
        ("FROM x\nWORKDIR /a\nCOPY src/ ./b/\n", ("/a", {"b/deep/a.py": "a"}, (), {})),
        ("FROM x\nWORKDIR /a\nCOPY run.sh /a\n", ("/a", {"run.sh": "r"}, ("run.sh",), {})),
        ("FROM x\nWORKDIR /a\nCOPY run.sh start\n", ("/a", {"start": "r"}, ("start",), {})),
        ('FROM x\nWORKDIR /a\nCOPY ["run.sh", "b/"]\n', ("/a", {"b/run.sh": "r"}, ("b/run.sh",), {})),
        ("FROM x\nWORKDIR /a\nWORKDIR b\nCOPY --chown=1:1 run.sh src/deep ./\n",
         ("/a/b", {"run.sh": "r", "a.py": "a"}, ("run.sh",), {})),
        ("# c\nFROM x\nRUN apt-get update && \\\n  # d\n  apt-get install y\nENV A=1 B='2 3'\nENV C 4\nWORKDIR /a\n",
         ("/a", {}, (), {"A": "1", "B": "2 3", "C": "4"})),
    ],
)  # fmt: skip
def test_what_a_dockerfile_puts_into_the_workspace(tmp_path: Path, text: str, expected: object) -> None:
    assert layout(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM x\nCOPY src .\n", "has no WORKDIR"),
        ("FROM x\nWORKDIR /a\nADD http://x /a\n", "Dockerfile:3: ADD needs the image"),
        ("FROM x\nWORKDIR /a\nUSER 1\n", "Dockerfile:3: USER needs"),
        ("FROM x AS y\nFROM z\nWORKDIR /a\n", "Dockerfile:2: a second FROM"),
        ("FROM x\nWORKDIR /a\nCOPY --from=y src .\n", "Dockerfile:3: COPY --from=y src . needs"),
        ("FROM x\nWORKDIR /a\nCOPY src/*.py .\n", "needs the image"),
        ("FROM x\nWORKDIR /a\nCOPY src /etc\n", "Dockerfile:3: COPY to /etc/deep/a.py, outside of /a"),
        ("FROM x\nWORKDIR /a\nCOPY ../x .\n", "there is none in environment/"),
        ("FROM x\nWORKDIR /a\nCOPY image.png .\n", "is no text"),
        ("FROM x\nWORKDIR /a\nENV P=$PATH:/x\n", "ENV P=$PATH:/x needs"),
        ("FROM x\nWORKDIR /a\nRUN <<EOF\nx\nEOF\n", "a here-document needs"),
    ],
)
def test_what_needs_the_image_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadTaskError) as error:
        layout(tmp_path, text)
    assert words in str(error.value)
