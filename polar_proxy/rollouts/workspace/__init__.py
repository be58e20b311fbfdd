"""Workspaces: the sandbox, image and repository of a task, prepared for the agent and read as a patch afterwards."""

from polar_proxy.rollouts.workspace.git import WorkspaceError
from polar_proxy.rollouts.workspace.prepare import TaskNotPossibleError, prepare_workspace, read_patch
from polar_proxy.rollouts.workspace.task_sandboxes import TaskSandboxes

__all__ = ["TaskNotPossibleError", "TaskSandboxes", "WorkspaceError", "prepare_workspace", "read_patch"]
