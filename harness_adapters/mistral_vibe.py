"""The agent Mistral Vibe (https://github.com/mistralai/mistral-vibe), run headless over Chat Completions.

In Vibe's `config.toml`, Polar's endpoint is a custom provider with the backend `generic`.
"""

from __future__ import annotations

from harness_adapters.base import (
    Connection,
    Endpoint,
    HarnessInfo,
    Installation,
    LaunchContext,
    LaunchPlan,
    McpServer,
    WireApi,
)
from harness_adapters.toolkit.adapter import SESSION_KEY, RunLimit, make_launch_plan
from harness_adapters.toolkit.python_venv import VenvHarness

_SETTINGS = ".vibe/config.toml"


class MistralVibe(VenvHarness):
    name = "mistral-vibe"
    default_version = "3.0.2"
    info = HarnessInfo(
        homepage="https://github.com/mistralai/mistral-vibe",
        package="pypi:mistral-vibe",
        wire_apis=("openai_chat",),
        runtime="python 3.12 or 3.13, and its own native program",
        features=frozenset({"stream", "resume", "mcp", "skills", "parallel_tools", "reasoning"}),
        notes="Exits with 3 at its turn limit.",
        version_command=("{root}/bin/vibe", "--version"),
        summary="Mistral's agent for the terminal",
        command="vibe",
    )
    limits = (RunLimit(3, "its turn limit", "Stopped: turn_limit"),)
    skills_folder = ".vibe/skills"
    imports = "vibe.app_server, vibe.core.loop"
    pythons = ("3.12", "3.13")

    def make_connection(self, endpoint: Endpoint, wire_api: WireApi) -> Connection:
        return Connection(
            env={"VIBE_HOME": f"{endpoint.home}/.vibe", SESSION_KEY: endpoint.api_key},
            settings={_SETTINGS: _settings(endpoint)},
        )

    def make_plan(self, installed: Installation, context: LaunchContext, wire_api: WireApi) -> LaunchPlan:
        argv = [str(installed.root / "bin" / "vibe"), f"--prompt={context.instruction}"]
        argv += ["--auto-approve", "--trust", "--max-turns", str(context.max_steps)]
        argv += ["--continue"] if context.resume else []
        env = {
            # Otherwise it asks the desktop's keyring for keys of unused providers.
            "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
            "PYTHONUNBUFFERED": "1",
        }
        settings = {_SETTINGS: {"mcp_servers": [_server(server) for server in context.mcp_servers]}}
        return make_launch_plan(self.make_connection(context, wire_api), argv, env=env, settings=settings)


def _settings(endpoint: Endpoint) -> dict[str, object]:
    """Return the content of Vibe's config.toml. It names the environment variable that holds the API key."""
    provider = {
        "name": "polar",
        "api_base": endpoint.base_url,
        "api_key_env_var": SESSION_KEY,
        "api_style": "openai",
        "backend": "generic",
    }
    return {
        "active_model": "polar",
        "enable_telemetry": False,
        "enable_update_checks": False,
        "enable_auto_update": False,
        "enable_notifications": False,
        "enable_connectors": False,
        "api_timeout": endpoint.request_timeout_seconds,
        "providers": [provider],
        "models": [{"name": endpoint.model, "provider": "polar", "alias": "polar"}],
        # Experiments are downloaded from Mistral's server.
        "experiments": {"enable": False},
    }


def _server(server: McpServer) -> dict[str, object]:
    if server.url is not None:
        return {"name": server.name, "transport": "streamable-http", "url": server.url}
    return {"name": server.name, "transport": "stdio", "command": list(server.command), "env": dict(server.env)}
