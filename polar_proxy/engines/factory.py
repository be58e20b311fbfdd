"""Which engine the settings name."""

from __future__ import annotations

import importlib
from pathlib import Path

from polar_proxy.config import EngineSettings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import UsageError

POLAR_TINY = Path(__file__).resolve().parent.parent / "assets" / "polar_tiny"
"""The bundled policy."""


def make_engine(settings: EngineSettings) -> Engine:
    """The engine, not yet entered. Raises UsageError when it is not known or something it needs is missing."""
    if settings.kind == "local":
        return _local(settings)
    if settings.kind == "vllm":
        if not settings.url:
            raise UsageError("--engine vllm needs --engine-url, such as http://127.0.0.1:8000.")
        from polar_proxy.engines.vllm.engine import VllmEngine

        return VllmEngine(settings.url, model=settings.model, api_key=settings.api_key)
    if settings.kind == "hosted":
        if not settings.url:
            raise UsageError("--engine hosted needs --engine-url, such as https://api.example.com/v1.")
        from polar_proxy.engines.openai import OpenAIEngine

        return OpenAIEngine(settings.url, model=settings.model, api_key=settings.api_key)
    if settings.kind == "scripted":
        from polar_proxy.engines.scripted import ScriptedEngine

        return ScriptedEngine()
    module_name, separator, class_name = settings.kind.partition(":")
    if not separator:
        raise UsageError(
            f"There is no engine {settings.kind!r}: choose local, vllm, hosted, scripted, or module:Class."
        )
    try:
        made = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"Cannot load engine {settings.kind!r}: {error}.") from error
    if not isinstance(made, Engine):
        raise UsageError(f"{settings.kind} is not an Engine (polar_proxy.engines.base.Engine).")
    return made


def _local(settings: EngineSettings) -> Engine:
    if settings.url:
        raise UsageError("--engine-url is for --engine vllm or hosted; the local engine runs in this process.")
    path = POLAR_TINY if settings.model in (None, "polar-tiny") else Path(str(settings.model)).expanduser()
    if not (path / "config.json").is_file():
        raise UsageError(f"There is no model in {path}: --model takes a folder with config.json and safetensors.")
    try:
        from polar_proxy.engines.local import LocalEngine
    except ImportError as error:
        raise UsageError(f"The local engine needs {error.name}: pip install 'polar-proxy[local]'.") from error
    return LocalEngine(path, name="polar-tiny" if path == POLAR_TINY else path.name)
