"""Hostile rows of tasks, Harbor folders, requests to the API and callback URLs.

Each must be refused without running or importing anything; the honest ones among them must be accepted.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

from polar_proxy.allowed_code import NO_CODE, AllowedCode
from polar_proxy.api import allow_all, create_api
from polar_proxy.api.callback_transport import PublicTransport
from polar_proxy.client.inprocess import InProcessTransport
from polar_proxy.config import Settings
from polar_proxy.errors import PolarError
from polar_proxy.rollouts.task_sandboxes import TaskSandboxes
from polar_proxy.store import open_store
from polar_proxy.tasks import TaskList, get_source

Attack = tuple[str, str, bool, Callable[[Path, Path], Awaitable[tuple[bool, str]]]]
"""Name, kind (`Outcome.where`), whether it is a control, and the attack: (folder, marker) -> (succeeded, result)."""
MARKER = "<marker>"
HARBOR = Path(__file__).parents[2] / "examples" / "tasks" / "harbor" / "running-mean"

_TESTS = {"test_command": ["true"], "fail_to_pass": ["x"]}
_SWEBENCH = {
    "instance_id": "i",
    "repo": "a/b",
    "base_commit": "HEAD",
    "problem_statement": "p",
    "test_patch": "diff",
    "FAIL_TO_PASS": ["x"],
    "PASS_TO_PASS": [],
    "test_command": "true",
    "image": "a/b",
}


def _environment(**fields: object) -> dict[str, Any]:
    return {"environment": fields}


def _repository(source: str, commit: str = "HEAD") -> dict[str, Any]:
    return _environment(repository={"source": source, "commit": commit})


ROWS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("honest_row", {}, True),
    ("allowed_function", {"evaluator": {"kind": "python", "function": "allowed:score"}}, True),
    ("function_of_a_row", {"evaluator": {"kind": "python", "function": "polar_attack:score"}}, False),
    ("function_of_the_library", {"evaluator": {"kind": "python", "function": "os:system"}}, False),
    ("parser_of_a_row", {"evaluator": {"kind": "tests", "parser": "polar_attack:parse"}, **_TESTS}, False),
    ("parser_os_system", {"evaluator": {"kind": "tests", "parser": "os:system"}, **_TESTS}, False),
    ("parser_of_a_swebench_row", {**_SWEBENCH, "log_parser": "polar_attack:parse"}, False),
    ("repository_is_an_option", _repository(f"--upload-pack=touch {MARKER} x://"), False),
    ("repository_runs_a_command", _repository(f"ext::sh -c 'touch {MARKER}' x://"), False),
    ("repository_host_is_an_option", _repository(f"ssh://-oProxyCommand=touch {MARKER}/x"), False),
    ("commit_is_an_option", _repository(".", f"--upload-pack=touch {MARKER}"), False),
    ("commit_is_a_refspec", _repository(".", "+refs/*:refs/*"), False),
    ("commit_is_a_range", _repository(".", "HEAD..main"), False),
    ("image_is_an_option", _environment(image="--privileged"), False),
    ("image_is_a_path", _environment(image="a/../../containers/json"), False),
    ("base_commit_is_an_option", _environment(image="a/b", base_commit="--hard"), False),
    ("workdir_leaves", _environment(workdir="/workspace/../../etc"), False),
    ("folder_is_the_root", _environment(folders=["/."]), False),
    ("variable_with_equals", _environment(env={"A=B": "x"}), False),
    ("variable_with_nul", _environment(env={"A": "x\0y"}), False),
    ("negative_memory", _environment(memory_mb=-1), False),
    ("infinite_time", {"timeout_seconds": float("inf")}, False),
    ("file_leaves", {"files": {"../../x": ""}}, False),
    ("file_is_a_hook", {"hidden_files": {".git/hooks/post-checkout": ""}}, False),
    ("name_with_escapes", {"task_id": "a\u001b]0;owned\u0007"}, False),
    ("name_without_end", {"task_id": "a" * 100_000}, False),
    ("environment_is_text", {"environment": "x"}, False),
    ("repository_is_text", _environment(repository="x"), False),
    ("kind_is_a_list", {"evaluator": {"kind": ["python"]}}, False),
)
"""(name, change of an honest row, whether it is honest)"""


def row_attacks(rows: Iterable[tuple[str, dict[str, Any], bool]]) -> list[Attack]:
    def make(change: dict[str, Any]) -> Callable[[Path, Path], Awaitable[tuple[bool, str]]]:
        async def attack(folder: Path, marker: Path) -> tuple[bool, str]:
            honest = {"task_id": "t", "instruction": "Do it.", "evaluator": {"kind": "command", "argv": ["true"]}}
            row = change if "problem_statement" in change else {**honest, **change}
            file = folder / "rows.jsonl"
            file.write_text(json.dumps(row).replace(MARKER, str(marker)))
            return await _read(file, NO_CODE.including("allowed:score"))

        return attack

    return [(name, "row", control, make(change)) for name, change, control in rows]


async def _read(source: Path, code: AllowedCode = NO_CODE) -> tuple[bool, str]:
    """Read the tasks and fetch their repositories. Return whether a task was accepted, and the result as text."""
    try:
        found = get_source(str(source), code)
        assert isinstance(found, TaskList)
        for seed in found.seeds:
            await TaskSandboxes("process").bundle(found.task(seed))
    except PolarError as error:
        return False, f"refused: {str(error)[:160]}"
    return bool(found.seeds), "accepted" if found.seeds else f"refused: {str(found.refused[0])[:160]}"


# ---------------------------------------------------------------- Harbor folders


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


_TOML = (HARBOR / "task.toml").read_text()
_FROM = "FROM x\nWORKDIR /app\n"
_FOLDERS: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
    ("instruction_is_a_link", "instruction.md", _link("/etc/passwd")),
    ("task_file_is_a_link", "task.toml", _link(str(HARBOR / "task.toml"))),
    ("tests_are_a_link", "tests", _link("/etc")),
    ("link_in_the_tests", "tests/more", _link("/etc/passwd")),
    ("environment_is_a_link", "environment", _link("/")),
    ("copied_link", "environment/src/passwd", _link("/etc/passwd")),
    ("docker_compose", "environment/docker-compose.yaml", _text("services: {}")),
    ("copy_from_a_stage", "environment/Dockerfile", _text(_FROM + "COPY --from=host /etc /app\n")),
    ("copy_leaves", "environment/Dockerfile", _text(_FROM + "COPY ../../../../../etc/passwd /app/\n")),
    ("copy_is_malformed", "environment/Dockerfile", _text(_FROM + 'COPY ["a", \n')),
    ("quote_without_end", "environment/Dockerfile", _text(_FROM + "COPY 'a b\n")),
    ("add_from_a_url", "environment/Dockerfile", _text(_FROM + "ADD http://169.254.169.254/ /app/\n")),
    ("image_is_an_option", "task.toml", _text('[environment]\ndocker_image = "--privileged"\n')),
    ("host_variable", "task.toml", _text(_TOML + '\n[verifier.env]\nX = "${HOME}"\n')),
    ("environment_is_text", "task.toml", _text('environment = "x"\n')),
    ("memory_is_text", "task.toml", _text('[environment]\nmemory_mb = "all"\n')),
    ("instruction_is_no_text", "instruction.md", lambda path: path.write_bytes(b"\xff\xfe")),
)


def folder_attacks() -> list[Attack]:
    def make(name: str, change: Callable[[Path], object]) -> Callable[[Path, Path], Awaitable[tuple[bool, str]]]:
        async def attack(folder: Path, marker: Path) -> tuple[bool, str]:
            task = folder / "task"
            shutil.copytree(HARBOR, task)
            path = task / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            change(path)
            return await _read(task)

        return attack

    async def honest(folder: Path, marker: Path) -> tuple[bool, str]:
        return await _read(HARBOR)

    return [
        ("honest_folder", "harbor folder", True, honest),
        *((name, "harbor folder", False, make(path, change)) for name, path, change in _FOLDERS),
    ]


# ---------------------------------------------------------------- requests


def _spec(**change: object) -> dict[str, Any]:
    row = {"task_id": "t", "instruction": "Do it.", "evaluator": {"kind": "command", "argv": ["true"]}, **change}
    return {"task": None, "task_specs": [row]}


_REQUESTS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("honest_request", {}, True),
    ("honest_tasks", _spec(), True),
    ("task_is_code", {"task": "polar_attack:tasks"}, False),
    ("task_is_a_folder", {"task": str(HARBOR)}, False),
    ("task_is_a_relative_path", {"task": "../../etc"}, False),
    ("agent_is_code", {"harness": "polar_attack:Agent"}, False),
    ("agent_version_is_an_option", {"harness": "codex@--registry=http://x"}, False),
    ("agent_version_is_a_url", {"harness": "codex@http://x/y.tgz"}, False),
    ("agent_version_is_a_path", {"harness": "codex@../../../x"}, False),
    ("agent_mounts_a_file", {"harness": "shell:cat {mount:/etc/shadow}"}, False),
    ("sandbox_is_the_host", {"sandbox": "process", "harness": "shell:id"}, False),
    ("function_of_a_task", _spec(evaluator={"kind": "python", "function": "polar_attack:score"}), False),
    ("repository_of_the_host", _spec(environment={"repository": {"source": "/", "commit": "HEAD"}}), False),
    ("repository_as_a_url", _spec(environment={"repository": {"source": "file:///", "commit": "HEAD"}}), False),
    ("image_built_from_the_host", _spec(environment={"build": str(HARBOR / "environment")}), False),
    ("tests_of_the_host", _spec(evaluator={"kind": "harbor", "tests": "/etc", "digest": "x"}), False),
    ("callback_to_loopback", {"callback_url": "http://127.0.0.1:22/"}, False),
    ("callback_to_metadata", {"callback_url": "http://169.254.169.254/latest/meta-data"}, False),
    ("callback_to_a_file", {"callback_url": "file:///etc/passwd"}, False),
    ("callback_with_a_password", {"callback_url": "https://me:secret@example.com/"}, False),
)


def api_attacks() -> list[Attack]:
    def make(change: dict[str, Any]) -> Callable[[Path, Path], Awaitable[tuple[bool, str]]]:
        async def attack(folder: Path, marker: Path) -> tuple[bool, str]:
            settings = Settings(home=folder / "home", run={"sandbox": "auto", "harness": "mini-swe-agent"})
            async with open_store(str(folder / "polar.db")) as store:
                transport = InProcessTransport(create_api(store, settings=settings, auth=allow_all))
                async with httpx.AsyncClient(transport=transport, base_url="http://in-process") as http:
                    body = {"task": "swe-task", "seed": 1, **change}
                    body = {
                        name: value for name, value in body.items() if not (name == "seed" and "task_specs" in body)
                    }
                    answer = await http.post("/api/v1/jobs", json=body)
            if answer.status_code == 201:
                return True, "accepted"
            return False, f"{answer.status_code}: {answer.json()['error']['message'][:160]}"

        return attack

    return [(name, "request", control, make(change)) for name, change, control in _REQUESTS]


# ---------------------------------------------------------------- callbacks


def callback_attacks() -> list[Attack]:
    """Return attacks by callbacks to a receiver on loopback, whose address is written in several ways."""

    def make(host: str, transport: Callable[[], httpx.AsyncBaseTransport]) -> Any:
        async def attack(folder: Path, marker: Path) -> tuple[bool, str]:
            called = asyncio.Event()

            async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                called.set()
                writer.write(b"HTTP/1.1 204 X\r\nconnection: close\r\n\r\n")
                writer.close()

            server = await asyncio.start_server(receive, ["127.0.0.1", "::1"], 0)
            async with server, httpx.AsyncClient(transport=transport(), trust_env=False, timeout=10) as http:
                port = next(
                    one.getsockname()[1] for one in server.sockets if (":" in host) == (":" in one.getsockname()[0])
                )
                try:
                    await http.post(f"http://{host}:{port}/")
                except httpx.HTTPError as error:
                    return called.is_set(), f"{type(error).__name__}: {str(error)[:120]}"
                return called.is_set(), "the receiver was called"

        return attack

    hosts = ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]")
    return [
        ("allowed_callback", "callback", True, make("127.0.0.1", httpx.AsyncHTTPTransport)),
        *((f"callback_to_{host}", "callback", False, make(host, PublicTransport)) for host in hosts),
    ]
