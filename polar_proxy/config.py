"""All settings: defaults, then `polar.toml`, then environment variables, then command-line flags; the last one wins.

`polar.toml` is read from the Polar home (`~/.polar`, or $POLAR_HOME) and from the working directory. A setting that is
in both is taken from the working directory. Environment variables begin with POLAR_ and use two underscores for nested
settings: `POLAR_GATEWAY__PORT=9000`. No other module reads the environment.
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
    # The docstrings of fields are their descriptions in docs/reference/settings.md.
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class GatewayLimits(_Section):
    """Limits of the gateway's server that keep one client from stopping it for all others."""

    connections: int = Field(4096, ge=1)
    """Open connections. Lowered to half of the file descriptors that the system allows this process."""
    sandbox_connections: int = Field(256, ge=1)
    """Open connections from inside one sandbox. They count as open connections of the gateway too."""
    head_kb: int = Field(64, ge=1)
    """Size of a request's headers in KiB."""
    headers: int = Field(200, ge=1)
    """Number of a request's headers."""
    url_kb: int = Field(16, ge=1)
    """Size of a request's URL in KiB."""
    head_seconds: float = Field(20.0, gt=0)
    """Time from the first byte of a request to the end of its headers."""
    body_pause_seconds: float = Field(30.0, gt=0)
    """Longest pause between two parts of a request body."""
    bodies_mb: int = Field(512, ge=1)
    """Size of all request bodies that are read and parsed at a time, in MiB."""
    body_values: int = Field(2_000_000, ge=1)
    """Number of JSON values in a request body."""


class GatewaySettings(_Section):
    """The gateway: where agents send their model calls."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8399, ge=0, le=65535)
    """Port to listen on; 0 takes any free port."""
    allowed_hosts: frozenset[str] = frozenset({"host.docker.internal", "host.containers.internal"})
    """Host names, besides those of loopback, that requests to a gateway on loopback may be addressed to or come from
    (the headers Host and Origin). It protects a gateway without keys from pages in a browser."""
    require_known_keys: bool = False
    """Refuse unknown session keys on loopback too. On any other address they are always refused."""
    shared: bool = False
    """Set this if other gateways serve sessions of the same database. Before each request the gateway then loads what
    the others have recorded of the request's session."""
    cluster_port: int = Field(0, ge=0, le=65535)
    """Port of the gateways on the nodes of a Ray cluster; 0 takes any free port."""
    max_body_mb: int = Field(256, ge=1)
    """Size limit of a request body in MiB."""
    limits: GatewayLimits = GatewayLimits()
    """Limits that keep one client from stopping the gateway for all others."""
    heartbeat_seconds: float = Field(15.0, gt=0)
    """Send a comment line on a stream that has been silent for this long. Google's streams get none."""
    headers_after_seconds: float = Field(2.0, ge=0)
    """Send the headers of a stream after this time if no token has arrived. An error before that keeps its HTTP
    status."""
    join_retries: Literal["evidence", "always", "never"] = "evidence"
    """Which equal requests share one answer. `evidence`: those that are known to be retries, by a lost connection or
    the SDK's retry header. `always`: all that arrive while the first runs or shortly after. `never`: none."""
    retry_window_seconds: float = Field(10.0, ge=0)
    """How long a finished answer is kept for a retry, and how long an equal request may count as one."""
    retry_grace_seconds: float = Field(2.0, ge=0)
    """How long an answer is generated further after its client disconnected, so that a retry can take it over."""
    prompt_mode: PromptModeSetting = "continue"
    """`continue`: if possible, a prompt is the exact tokens of the call that it extends, followed by the tokens of the
    new messages. `render`: the engine renders every request from its messages."""
    past_reasoning: Literal["keep", "strip"] = "keep"
    """Reasoning of earlier turns in continued prompts. `keep`: leave it as it was sampled. `strip`: if the model's chat
    template drops reasoning of earlier turns, let the engine render that request."""
    normalisers_off: frozenset[str] = frozenset()
    """Names of the normalisers (rules in polar_proxy/sessions/hashing.py for differences between messages that are
    ignored) to switch off."""


class EngineSettings(_Section):
    """The inference engine."""

    kind: str = "local"
    """`local`, `vllm`, `openai`, or module:Class."""
    url: str | None = None
    """Where the engine listens (vllm, openai)."""
    model: str | None = None
    """local: a folder of weights, by default the bundled polar-tiny. vllm, openai: the name of the served model."""
    api_key: str | None = Field(None, repr=False)
    """Key for the engine (vllm, openai). Best set as POLAR_ENGINE__API_KEY; Polar never writes it anywhere."""


class RunSettings(RolloutSpec):
    """Defaults for rollouts, which a command or request may override, and limits on how many run."""

    concurrency: int = Field(2, ge=1)
    """Rollouts at a time."""
    samples: int = Field(1, ge=1)
    """Rollouts of each task."""
    backlog: int | None = Field(None, ge=1)
    """Start no new rollouts while this many finished groups wait for a trainer. Default: no limit."""
    prebuild: bool = False
    """In docker sandboxes, build each agent into an image (`polar harness prebuild`) instead of mounting its files.
    Needed if the Docker engine cannot see this machine's disk."""

    def job_spec(self, **given: Any) -> JobSpec:
        """Return a job with these settings, except for those in `given`."""
        return JobSpec(**{**self.model_dump(include=set(JobSpec.model_fields)), **given})


class ApiSettings(_Section):
    """The HTTP API."""

    callback_secret: str | None = Field(None, repr=False)
    """Secret that signs callbacks: `whsec_` and base64. By default it is created in the file callback-secret in the
    home. It is never written to the database."""
    callback_attempts: int = Field(8, ge=1)
    """Give up a callback after this many attempts."""
    callback_pause_seconds: float = Field(5.0, gt=0)
    """Pause before the second attempt; each further pause is four times as long."""
    callback_timeout_seconds: float = Field(15.0, gt=0)
    """How long to wait for the receiver of a callback."""


class AdmissionSettings(_Section):
    """Conditions under which a server starts no further agent. If no agent runs, one is always started."""

    engine_kv: float = Field(0.5, gt=0, le=1)
    """KV-cache usage above which no new agent starts (vLLM reports it). Agents that wait for a tool do not count in it,
    so leave room for their conversations, which should stay cached. 1 disables the check."""
    engine_queue: int = Field(16, ge=0)
    """Queued requests per engine replica above which no new agent starts (vLLM reports them)."""
    memory_mb: int = Field(768, ge=0)
    """MiB of memory to reserve for a rollout whose task does not say how much it needs. 0 disables the check."""
    memory_reserve_mb: int = Field(512, ge=0)
    """MiB of memory to keep free."""


class Settings(BaseSettings):
    """All settings: those at the top level, and the sections."""

    model_config = SettingsConfigDict(
        env_prefix="POLAR_",
        env_nested_delimiter="__",
        extra="forbid",
        nested_model_default_partial_update=True,
        use_attribute_docstrings=True,
    )

    home: Path = Path("~/.polar")
    """Folder of the database, keys, installed harnesses and training runs. Set it as POLAR_HOME."""
    db: str | None = None
    """Database URL or file; by default polar.db in the home."""
    url: str | None = None
    """The server that commands talk to. Without it, commands use the database directly."""
    api_key: str | None = Field(None, repr=False)
    """Key for that server. On the server's own machine the default is the key in the file api-key in the home."""
    harnesses: Path | None = None
    """Folder of the installed harnesses; by default harnesses/ in the home."""
    gateway: GatewaySettings = GatewaySettings()
    """The gateway."""
    engine: EngineSettings = EngineSettings()
    """The inference engine."""
    run: RunSettings = RunSettings()
    """Rollouts."""
    admission: AdmissionSettings = AdmissionSettings()
    """Conditions under which a server starts no further agent."""
    api: ApiSettings = ApiSettings()
    """The HTTP API."""

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
