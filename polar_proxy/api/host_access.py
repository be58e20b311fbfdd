"""Limit which files, code and sandboxes of the server's machine a request may use, as the operator's settings say.

A request is untrusted data. The tasks of a job may come with the request, or from a built-in family. A request may name
a file or folder of the server only below one of the folders in the setting `api.folders`, and Python code only if the
setting `allowed_code` lists it. The `process` sandbox, which isolates nothing, is allowed only if the setting
`run.sandbox` names it. A command that runs this API in its own process, without a server, may use anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from polar_proxy.allowed_code import AllowedCode
from polar_proxy.api.context import ApiContext
from polar_proxy.api_models import JobRequest
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts.harnesses import mounted_paths
from polar_proxy.tasks import Task, is_family


def code_of_request(context: ApiContext, body: JobRequest) -> AllowedCode:
    """Return the Python code (`MODULE:NAME`) that a job request and its tasks may use, as the settings allow.

    If the request comes from a command in this process, such as `polar submit` without a server, also allow the code
    that the request names as its task source or harness.
    """
    named = (body.task or "", body.harness) if context.from_this_process else ()
    return context.settings.code(*named)


def check_source(context: ApiContext, name: str) -> None:
    """Raise UsageError for a task source that is a file or folder outside of the configured folders."""
    is_path = "/" in name or os.path.exists(name)  # False for a name that no file can have
    if is_path and not is_family(name):
        _check_paths(context, "task", [name])


def check_job(context: ApiContext, spec: JobSpec, tasks: Iterable[Task]) -> None:
    """Raise UsageError if a job uses a sandbox or folder of this machine that the operator did not allow."""
    if context.from_this_process:
        return
    if spec.sandbox == "process" and context.settings.run.sandbox != "process":
        raise UsageError(
            "sandbox: a process sandbox isolates nothing, so a request may choose it only if the server's own setting "
            'is run.sandbox = "process"; use auto, docker or bubblewrap.'
        )
    _check_paths(context, "harness", mounted_paths(spec.harness))
    for task in tasks:
        _check_paths(context, f"task {task.task_id}", task.host_paths)


def _check_paths(context: ApiContext, what: str, paths: Iterable[str]) -> None:
    if context.from_this_process:
        return
    folders = [folder.expanduser().resolve() for folder in context.settings.api.folders]
    for path in paths:
        try:
            resolved = Path(os.path.expanduser(path)).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # too long, a circle of links, a NUL
            raise UsageError(f"{what}: {path[:200]!r} is not the path of a file: {error}") from None
        if not any(resolved.is_relative_to(folder) for folder in folders):
            raise UsageError(
                f"{what}: {path} is not in a folder that requests may use. The server's operator lists such folders in "
                "the setting api.folders."
            )
