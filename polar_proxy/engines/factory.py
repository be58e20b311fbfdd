"""Make the engine that the settings name."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from polar_proxy.config import EngineSettings, provider_key
from polar_proxy.engines.base import Engine
from polar_proxy.engines.bundled import MAX_ANSWER_TOKENS, POLAR_TINY_NAME, is_bundled
from polar_proxy.errors import PolarError, UsageError

POLAR_TINY = Path(__file__).resolve().parent.parent / "assets" / "polar_tiny"
"""Folder of the bundled demo policy."""


def make_engine(settings: EngineSettings) -> Engine:
    """Return the engine, not yet entered.

    Raises UsageError if no engine has this name, or if a setting, model or package that it needs is missing or wrong.
    """
    if settings.kind == "local":
        return _local(settings)
    if settings.kind == "vllm":
        from polar_proxy.engines.vllm import VllmEngine

        url = _url(settings, "http://127.0.0.1:8000")
        if settings.model_folder is not None and not Path(settings.model_folder).is_dir():
            raise UsageError(f"There is no folder {settings.model_folder} (setting engine.model_folder).")
        return VllmEngine(
            url,
            model=settings.model,
            api_key=settings.api_key,
            model_folder=settings.model_folder,
            vllm_python=settings.vllm_python,
            vllm_parsers=settings.vllm_parsers,
        )
    if settings.kind == "llamacpp":
        from polar_proxy.engines.llamacpp import LlamaCppEngine

        url = _url(settings, "http://127.0.0.1:8080")
        return LlamaCppEngine(url, model=settings.model, api_key=settings.api_key)
    if settings.kind in ("openai", "anthropic", "google"):
        return _hosted(settings)
    if settings.kind == "passthrough":
        from polar_proxy.engines.passthrough.engine import PassthroughEngine

        return PassthroughEngine(settings.url)
    if settings.kind == "scripted":
        from polar_proxy.engines.scripted import ScriptedEngine

        return ScriptedEngine()
    return _by_name(settings.kind)


def _hosted(settings: EngineSettings) -> Engine:
    from polar_proxy.engines.hosted.anthropic import ANTHROPIC_URL, AnthropicEngine
    from polar_proxy.engines.hosted.google import GOOGLE_URL, GoogleEngine
    from polar_proxy.engines.hosted.openai import OPENAI_URL, OpenAIEngine

    key = provider_key(settings)
    if settings.kind == "openai":
        return OpenAIEngine(settings.url or OPENAI_URL, model=settings.model, api_key=key)
    if settings.model is None:
        raise UsageError(f"--engine {settings.kind} needs --model, the name of one of the provider's models.")
    if settings.kind == "anthropic":
        return AnthropicEngine(settings.url or ANTHROPIC_URL, model=settings.model, api_key=key)
    return GoogleEngine(settings.url or GOOGLE_URL, model=settings.model, api_key=key)


@contextlib.asynccontextmanager
async def open_engines(settings: Mapping[str, EngineSettings]) -> AsyncIterator[dict[str, Engine]]:
    """Enter the engines of the settings [engines]. Yields a mapping from name to engine.

    If an engine cannot be made or entered, raises UsageError with the engine's name and the reason.
    """
    async with contextlib.AsyncExitStack() as stack:
        opened: dict[str, Engine] = {}
        for name, one in settings.items():
            try:
                opened[name] = await stack.enter_async_context(make_engine(one))
            except PolarError as error:
                raise UsageError(f"The engine {name} of [engines] cannot be used: {error}") from error
        yield opened


def _url(settings: EngineSettings, example: str) -> str:
    if not settings.url:
        raise UsageError(f"--engine {settings.kind} needs --engine-url, such as {example}.")
    return settings.url


def _local(settings: EngineSettings) -> Engine:
    if settings.url:
        raise UsageError(
            "--engine-url is for engines behind a server (vllm, openai, ...), but the local engine runs in this "
            "process: leave the option out, or choose another --engine."
        )
    path = POLAR_TINY if is_bundled(settings) else Path(str(settings.model)).expanduser()
    if not (path / "config.json").is_file():
        raise UsageError(f"There is no model in {path}: --model takes a folder with config.json and safetensors.")
    try:
        from polar_proxy.engines.local import LocalEngine
    except ImportError as error:
        raise UsageError(f"The local engine needs {error.name}: pip install 'polar-proxy[local]'.") from error
    if path == POLAR_TINY:
        return LocalEngine(path, name=POLAR_TINY_NAME, max_answer=MAX_ANSWER_TOKENS)
    return LocalEngine(path, name=path.name)


def _by_name(kind: str) -> Engine:
    """Import the engine class that `kind` names as `module:Class`, and return an instance made without arguments."""
    module_name, separator, class_name = kind.partition(":")
    if not separator:
        raise UsageError(
            f"There is no engine {kind!r}: choose local, vllm, llamacpp, openai, anthropic, google, passthrough, "
            "scripted, or module:Class."
        )
    try:
        engine = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"Cannot load engine {kind!r}: {error}.") from error
    if not isinstance(engine, Engine):
        raise UsageError(f"{kind} is not an Engine (polar_proxy.engines.base.Engine).")
    return engine
