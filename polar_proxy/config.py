"""One tree of settings: defaults < polar.toml < environment (POLAR_...) < flags. The only reader of the environment.

Of `polar.toml` there may be one in the Polar home (`~/.polar`, or $POLAR_HOME) and one in the working directory,
which wins setting by setting. Nested settings use two underscores in the environment: `POLAR_GATEWAY__PORT=9000`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from polar_proxy.rollout_spec import JobSpec, RolloutSpec

PromptModeSetting = Annotated[
    Literal["continue", "render"], BeforeValidator(lambda value: "render" if value == "observe" else value)
]
"""`observe` is accepted as another name for `render`."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GatewaySettings(_Section):
    host: str = "127.0.0.1"
    port: int = Field(8399, ge=0, le=65535)
    """0 takes any free port."""
    require_known_keys: bool = False
    """Refuse unknown keys on loopback too. On any other address they are always refused."""
    shared: bool = False
    """Other gateways serve the sessions of this database too: look for their calls before each request."""
    cluster_port: int = Field(0, ge=0, le=65535)
    """Of the gateways on the nodes of a cluster; 0: each takes any free one."""
    max_body_mb: int = Field(256, ge=1)
    heartbeat_seconds: float = Field(15.0, gt=0)
    """How long a stream may be silent before a comment line is sent."""
    headers_after_seconds: float = Field(2.0, ge=0)
    """How long to wait for the first token before the response headers go out (a fast error keeps its own status)."""
    join_retries: Literal["evidence", "always", "never"] = "evidence"
    """Which equal requests share one answer: those that are shown to be retries (a lost connection, or the SDK's retry
    header); all that come while the first is in flight or was just answered; none."""
    retry_window_seconds: float = Field(10.0, ge=0)
    """How long an answer counts as just given, and is kept for a retry."""
    retry_grace_seconds: float = Field(2.0, ge=0)
    """How long a generation goes on whose client is lost, for its retry to take it over."""
    prompt_mode: PromptModeSetting = "continue"
    """continue: sample each turn from exactly the tokens of the turn before, followed by what is new, if the
    engine can. render: let the engine render every request from its messages."""
    past_reasoning: Literal["keep", "strip"] = "keep"
    """Reasoning of earlier turns in continued prompts. keep: as it was sampled. strip: if the model's template
    drops it, let the engine render that request, which drops it too."""
    normalisers_off: frozenset[str] = frozenset()
    """Names of normalisers that history must not use (polar_proxy/sessions/normalisers.py lists them)."""


class EngineSettings(_Section):
    kind: str = "local"
    """local, vllm, openai, or module:Class."""
    url: str | None = None
    model: str | None = None
    """local: a folder of weights, default the bundled polar-tiny. vllm, openai: the served model's name."""
    api_key: str | None = Field(None, repr=False)
    """For vllm and openai. Best given as POLAR_ENGINE__API_KEY; it is never written anywhere."""


class RunSettings(RolloutSpec):
    """How rollouts are made where nothing else is said, and how many of them at a time."""

    concurrency: int = Field(2, ge=1)
    """Rollouts at a time."""
    samples: int = Field(1, ge=1)
    """Rollouts of each task."""
    backlog: int | None = Field(None, ge=1)
    """Start no new rollouts while this many finished groups wait for a trainer. Default: no limit."""
    prebuild: bool = False
    """Build the harness into the image of docker sandboxes, once for each (`polar harness prebuild`), in place of
    mounting it from this machine's disk: for a Docker engine that cannot see that disk."""

    def job_spec(self, **given: Any) -> JobSpec:
        """Return a job with these settings, in which `given` replaces what it names."""
        return JobSpec(**{**self.model_dump(include=set(JobSpec.model_fields)), **given})


class ApiSettings(_Section):
    callback_secret: str | None = Field(None, repr=False)
    """What callbacks are signed with: whsec_ and base64. Without it, one is made, in the file callback-secret in the
    home. It is never written into the database."""
    callback_attempts: int = Field(8, ge=1)
    callback_pause_seconds: float = Field(5.0, gt=0)
    """Before the second attempt; four times that before the third, and so on."""
    callback_timeout_seconds: float = Field(15.0, gt=0)


class AdmissionSettings(_Section):
    """When a service lets no further agent join those that run. One is always let in where none is."""

    engine_kv: float = Field(0.5, gt=0, le=1)
    """Share of the key-value cache that running requests hold above which it is full (vLLM says it): agents that wait
    for a tool hold none, and their conversations must stay cached, too (benchmarks/results/fleet.md). 1: not looked
    at."""
    engine_queue: int = Field(16, ge=0)
    """Requests waiting in the engine, for each of its replicas, above which its queue is long (vLLM says it)."""
    memory_mb: int = Field(768, ge=0)
    """MiB of this machine that a rollout is taken to need where its task does not say. 0: memory is not looked at."""
    memory_reserve_mb: int = Field(512, ge=0)
    """MiB that stay free."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="POLAR_",
        env_nested_delimiter="__",
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    home: Path = Path("~/.polar")
    db: str | None = None
    """Database URL or file; default polar.db in the home."""
    url: str | None = None
    """POLAR_URL: the server that commands talk to; without it they use the database themselves."""
    api_key: str | None = Field(None, repr=False)
    """POLAR_API_KEY: for that server. Without it, on this machine, the one in the file api-key in the home."""
    harnesses: Path | None = None
    """Where agents are installed, once a version; default harnesses/ in the home."""
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    run: RunSettings = RunSettings()
    admission: AdmissionSettings = AdmissionSettings()
    api: ApiSettings = ApiSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        home = Path(os.environ.get("POLAR_HOME", "~/.polar")).expanduser()
        files = [path for path in (home / "polar.toml", Path("polar.toml")) if path.is_file()]
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, files, deep_merge=True))

    def model_post_init(self, context: Any, /) -> None:
        self.home = self.home.expanduser().absolute()

    @property
    def harness_cache(self) -> Path:
        return (self.harnesses or self.home / "harnesses").expanduser().absolute()
