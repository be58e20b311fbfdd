"""Reading Harbor folders, refusing unsupported ones, and reading Dockerfiles without docker."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from polar_proxy.errors import BadTaskError
from polar_proxy.rewards import HarborEvaluator
from polar_proxy.tasks import TaskList, get_source
from polar_proxy.tasks.dockerfile import read_dockerfile

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tasks" / "harbor" / "running-mean"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLE, tmp_path / "set" / "one")
    return tmp_path / "set" / "one"


def read(folder: Path) -> TaskList:
    found = get_source(str(folder))
    assert isinstance(found, TaskList)
    return found


def test_reads_the_example() -> None:
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
    # The agent sees neither tests nor solution.
    (evaluator,) = task.evaluators
    assert isinstance(evaluator, HarborEvaluator)
    assert not any("judge" in text or "solve" in text for text in (*task.files, *task.files.values()))


def test_a_dockerfile_needs_docker_unless_the_task_declares_otherwise(folder: Path) -> None:
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
        ("task.toml", '[[steps]]\nname = "a"', "steps: Polar does not support several steps"),
        ("task.toml", "[environment]\ngpus = 1", "environment.gpus: Polar does not support GPUs"),
        ("task.toml", '[environment]\nos = "windows"', "only linux"),
        ("task.toml", '[environment]\nmemory = "much"', "environment.memory: 'much' is not a size"),
        ("task.toml", '[environment]\nstorage = "much"', "environment.storage: 'much' is not a size"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"', "Polar does not support the mode 'separate'"),
        ("task.toml", '[verifier.env]\nKEY = "${KEY}"', "variables of the host are not passed on"),
        ("task.toml", '[agent]\ntimeout_sec = "long"', "must be a number"),
        ("instruction.md", "", "instruction: is empty"),
        ("environment/docker-compose.yaml", "services:", "Polar does not support docker compose"),
        ("trajectory.json", "{}", "Polar does not support continuing a conversation"),
    ],
)
def test_refuses_bad_folders_and_reads_the_others(folder: Path, file: str, text: str, words: str) -> None:
    other = folder.parent / "two"
    shutil.copytree(folder, other)
    (other / "task.toml").write_text('[task]\nname = "polar/two"\n')
    (folder / file).write_text(text)
    found = read(folder.parent)
    (refusal,) = found.refused
    assert refusal.where == "one"
    assert words in refusal.reason
    assert [found.task(seed).task_id for seed in found.seeds] == ["polar/two"]


def test_refuses_a_dockerfile_whose_last_instruction_is_incomplete(folder: Path) -> None:
    with (folder / "environment" / "Dockerfile").open("a") as file:
        file.write("\nWORKDIR /else \\\n")
    assert "ends in a backslash" in read(folder).refused[0].reason


def test_names_missing_files(folder: Path) -> None:
    for name in ("tests/test.sh", "environment/Dockerfile", "instruction.md"):
        (folder / name).rename(folder / "away")
        assert Path(name).name in read(folder).refused[0].reason
        (folder / "away").rename(folder / name)
    (folder / "task.toml").unlink()
    assert read(folder.parent).refused[0].reason == "task.toml: there is no such file"


def test_refuses_links(folder: Path) -> None:
    (folder / "tests" / "link").symlink_to("/etc/passwd")
    assert "is a link" in read(folder).refused[0].reason


def workspace_of(tmp_path: Path, text: str) -> object:
    (tmp_path / "src" / "deep").mkdir(parents=True, exist_ok=True)
    (tmp_path / "src" / "deep" / "a.py").write_text("a")
    (tmp_path / "run.sh").write_text("r")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "image.png").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "Dockerfile").write_text(text)
    found = read_dockerfile(tmp_path)
    return found.workdir, found.files, found.executable, found.env


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
def test_reads_the_workspace_of_a_dockerfile(tmp_path: Path, text: str, expected: object) -> None:
    assert workspace_of(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM x\nCOPY src .\n", "has no WORKDIR"),
        ("FROM x\nWORKDIR /a\nADD http://x /a\n", "Dockerfile:3: ADD needs the image"),
        ("FROM x\nWORKDIR /a\nUSER 1\n", "Dockerfile:3: USER needs"),
        ("FROM x AS y\nFROM z\nWORKDIR /a\n", "Dockerfile:2: a second FROM"),
        ("FROM x\nWORKDIR /a\nCOPY --from=y src .\n", "Dockerfile:3: COPY --from=y src . needs"),
        ("FROM x\nWORKDIR /a\nCOPY src/*.py .\n", "needs the image"),
        ("FROM x\nWORKDIR /a\nCOPY src /etc\n", "Dockerfile:3: COPY to /etc/deep/a.py, outside /a"),
        ("FROM x\nWORKDIR /a\nCOPY ../x .\n", "there is no such file in environment/"),
        ("FROM x\nWORKDIR /a\nCOPY image.png .\n", "is not text"),
        ("FROM x\nWORKDIR /a\nENV P=$PATH:/x\n", "ENV P=$PATH:/x needs"),
        ("FROM x\nENV A=/a\nWORKDIR $A\n", "Dockerfile:3: WORKDIR $A needs"),
        ("FROM x\nWORKDIR /a\nRUN <<EOF\nx\nEOF\n", "a here-document needs"),
    ],
)
def test_refuses_instructions_that_need_the_image(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadTaskError) as error:
        workspace_of(tmp_path, text)
    assert words in str(error.value)
