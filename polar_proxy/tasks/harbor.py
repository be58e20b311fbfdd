"""Harbor task folders: task.toml, instruction.md, environment/, tests/, and optionally solution/.

Format: https://www.harborframework.com/docs/tasks. A task is refused if it uses a feature that changes the task's
meaning and is not supported here: several steps, docker compose, a separate verifier image, Windows, GPUs, MCP servers
or health checks. The error names the feature. The table [metadata] of task.toml is kept; other keys that are not used
here are ignored.

**Without docker.** A Dockerfile needs docker, but a task whose Dockerfile installs only programs that every sandbox has
may declare::

    [metadata.polar]
    without_image = true

Polar then takes WORKDIR as the workspace, copies the text files of COPY lines into it, sets the variables of ENV lines,
and ignores lines that install programs or describe the image (FROM, RUN, CMD, LABEL, ...). Any other line is refused.
So the task can also run in bubblewrap. In docker it still runs from its real image.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from polar_proxy.errors import BadTaskError
from polar_proxy.rewards import HarborEvaluator
from polar_proxy.rewards.harbor import LOGS, TESTS, files_digest, folder_files
from polar_proxy.tasks.dockerfile import read_dockerfile
from polar_proxy.tasks.task import Environment, Task
from polar_proxy.tasks.task_folder import check_inside, read_text

_DEFAULT_VERIFIER_SECONDS = 600.0
_LARGEST_NUMBER = 1e9
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGT])i?B?", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
_UNSUPPORTED_FILES = {
    "environment/docker-compose.yaml": "docker compose",
    "environment/docker-compose.yml": "docker compose",
    "trajectory.json": "continuing a conversation",
    "tests/Dockerfile": "a separate image for the verifier",
    "tests/test.bat": "Windows",
}
_UNSUPPORTED_KEYS = {
    ("steps",): "several steps",
    ("environment", "healthcheck"): "a health check",
    ("environment", "mcp_servers"): "MCP servers",
    ("environment", "gpus"): "GPUs",
    ("environment", "tpu"): "TPUs",
    ("verifier", "environment"): "a separate environment for the verifier",
    ("verifier", "collect"): "collecting evidence before the verifier",
    ("agent", "user"): "a separate user for the agent",
    ("verifier", "user"): "a separate user for the verifier",
}


def harbor_task(folder: Path, position: int) -> Task:
    """Read the task of one folder. Raises `BadTaskError` if the task cannot be used."""
    config = _config(folder)
    for name, what in _UNSUPPORTED_FILES.items():
        if (folder / name).exists():
            raise BadTaskError(f"{name}: Polar does not support {what}")
    for keys, what in _UNSUPPORTED_KEYS.items():
        if _at(config, *keys):
            raise BadTaskError(f"task.toml: {'.'.join(keys)}: Polar does not support {what}")
    if str(_at(config, "environment", "os") or "linux").lower() != "linux":
        raise BadTaskError("task.toml: environment.os: Polar supports only linux")
    if _at(config, "verifier", "environment_mode") == "separate":
        raise BadTaskError("task.toml: verifier.environment_mode: Polar does not support the mode 'separate'")
    tests = folder / "tests"
    check_inside(folder, tests / "test.sh")
    if not (tests / "test.sh").is_file():
        raise BadTaskError("tests/test.sh: there is no such file")
    environment, files = _environment(folder, config)
    return Task(
        task_id=str(_at(config, "task", "name") or folder.name),
        family="harbor",
        seed=position,
        instruction=read_text(folder, "instruction.md"),
        files=files,
        timeout_seconds=_number(config, "verifier", "timeout_sec") or _DEFAULT_VERIFIER_SECONDS,
        agent_seconds=_number(config, "agent", "timeout_sec"),
        # JSON has no dates: they become text.
        metadata={"folder": folder.name, **json.loads(json.dumps(_table(config, "metadata"), default=str))},
        environment=environment,
        evaluators=(
            HarborEvaluator(str(tests), files_digest(folder_files(tests)), env=_variables(config, "verifier")),
        ),
    )


def _environment(folder: Path, config: dict[str, Any]) -> tuple[Environment, dict[str, str]]:
    context = folder / "environment"
    image = _at(config, "environment", "docker_image")
    workdir = _at(config, "environment", "workdir")
    memory = _number(config, "environment", "memory_mb") or _megabytes(config, "memory")
    storage = _number(config, "environment", "storage_mb") or _megabytes(config, "storage")
    cpus = _number(config, "environment", "cpus")
    if workdir is not None and not isinstance(workdir, str):
        raise BadTaskError("task.toml: environment.workdir: must be text")
    env = _variables(config, "environment")
    check_inside(folder, context / "Dockerfile")
    built = (context / "Dockerfile").is_file()
    if not image and not built:
        raise BadTaskError("environment/Dockerfile: is missing, and task.toml has no environment.docker_image")
    environment = Environment(
        image=str(image) if image else None,
        build=str(context) if built and not image else None,
        workdir=workdir,
        folders=(TESTS, LOGS),
        snapshot=True,
        env=env,
        memory_mb=int(memory) if memory else None,
        cpus=cpus,
        disk_mb=int(storage) if storage else None,
        build_network=_at(config, "environment", "allow_internet") is True,
    )
    if _at(config, "metadata", "polar", "without_image") is not True:
        return environment, {}
    if not built:
        raise BadTaskError("metadata.polar.without_image: needs environment/Dockerfile, which is missing")
    found = read_dockerfile(context, workdir)
    env = {**found.env, **env}
    changed = replace(environment, without_image=True, workdir=found.workdir, executable=found.executable, env=env)
    return changed, found.files


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(read_text(folder, "task.toml"))
    except tomllib.TOMLDecodeError as error:
        raise BadTaskError(f"task.toml: {error}") from None
    for name in ("task", "agent", "verifier", "environment", "metadata"):
        _table(config, name)
    return config


def _at(config: dict[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _table(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise BadTaskError(f"task.toml: {name}: must be a table")
    return value


def _number(config: dict[str, Any], section: str, name: str) -> float | None:
    value = _at(config, section, name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_NUMBER:
        raise BadTaskError(f"task.toml: {section}.{name}: must be a number above 0 and below {_LARGEST_NUMBER:g}")
    return float(value)


def _variables(config: dict[str, Any], section: str) -> dict[str, str]:
    variables = _at(config, section, "env") or {}
    if not isinstance(variables, dict):
        raise BadTaskError(f"task.toml: {section}.env: must be a table")
    for name, value in variables.items():
        if not isinstance(value, str):
            raise BadTaskError(f"task.toml: {section}.env.{name}: must be text")
        if "${" in value:
            raise BadTaskError(
                f"task.toml: {section}.env.{name} must not contain '${{': variables of the host are not passed on"
            )
    return dict(variables)


def _megabytes(config: dict[str, Any], name: str) -> int | None:
    size = _at(config, "environment", name)
    if not size:
        return None
    found = _SIZE.fullmatch(str(size))
    if found is None:
        raise BadTaskError(f"task.toml: environment.{name}: {size!r} is not a size such as 2G")
    return max(1, int(float(found["number"]) * _MEGABYTES[found["unit"].upper()]))
