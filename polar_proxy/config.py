"""All settings: defaults, then `polar.toml`, then environment variables, then command-line flags; the last one wins.

`polar.toml` is read from the Polar home (`~/.polar`, or $POLAR_HOME) and from the working directory. A setting that is
in both is taken from the working directory. Environment variables begin with POLAR_ and use two underscores for nested
settings: `POLAR_GATEWAY__PORT=9000`. No other module reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from polar_proxy.allowed_code import AllowedCode, is_code
from polar_proxy.documented import DocumentedModel
from polar_proxy.rollout_spec import JobSpec, RolloutSpec
from polar_proxy.types import PromptMode


class _Section(DocumentedModel):
    model_config = ConfigDict(extra="forbid")


class GatewayLimits(_Section):
    """Limits that keep one client from stopping the gateway for all others."""

    connections: int = Field(4096, ge=1)
    """Maximum number of open connections, but at most half of the file descriptors that the system allows this
    process."""
    sandbox_connections: int = Field(256, ge=1)
    """Maximum number of open connections from inside one sandbox. They also count towards `connections`."""
    head_kb: int = Field(64, ge=1)
    """Maximum size of a request's headers in KiB."""
    headers: int = Field(200, ge=1)
    """Maximum number of headers of a request."""
    url_kb: int = Field(16, ge=1)
    """Maximum size of a request's URL in KiB."""
    head_seconds: float = Field(20.0, gt=0)
    """Maximum time from the first byte of a request to the end of its headers."""
    body_seconds: float = Field(300.0, gt=0)
    """Maximum time from the end of a request's headers to the end of its body."""
    body_rate_kb: float = Field(1.0, ge=0)
    """Minimum rate of a request body in KiB/s, measured over each `body_window_seconds`. A slower body is refused."""
    body_window_seconds: float = Field(20.0, gt=0)
    """Time over which the rate of a request body is measured. A body that pauses for longer is refused."""
    unread_seconds: float = Field(120.0, gt=0)
    """Disconnect a client that has read nothing for this long although part of its answer waits to be read."""
    keep_alive_seconds: float = Field(75.0, gt=0)
    """Close a connection if no further request comes for this long after an answer."""
    websocket_idle_seconds: float = Field(3600.0, gt=0)
    """Close a WebSocket that has had no request for this long."""
    bodies_mb: int = Field(512, ge=1)
    """Memory in MiB for all request bodies. A body counts from its first byte until the end of its answer. One session
    may use a quarter."""
    body_values: int = Field(250_000, ge=1)
    """Maximum number of JSON values in a request body."""
    messages: int = Field(4_000, ge=1)
    """Maximum number of messages, or of prompts, in a model request."""
    tools: int = Field(1_000, ge=1)
    """Maximum number of tools in a model request."""


class GatewaySettings(_Section):
    """The gateway: where agents send their model calls."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8399, ge=0, le=65535)
    """Port to listen on; 0 takes any free port."""
    allowed_hosts: frozenset[str] = frozenset({"host.docker.internal", "host.containers.internal"})
    """Further host names that a gateway on loopback accepts in the headers Host and Origin. The names of loopback are
    always accepted. The check protects a gateway without keys from web pages that are open in a browser."""
    require_known_keys: bool = False
    """Refuse unknown session keys on loopback too. On any other address they are always refused."""
    shared: bool = False
    """Set this if other gateways serve sessions of the same database. Before each request the gateway then loads what
    the others have recorded of the request's session."""
    record: Literal["required", "best_effort"] | None = None
    """How to answer calls while the store cannot be written. `required`: they are refused with status 503, and
    nothing is sampled. `best_effort`: they are answered, and their session is marked as incomplete, so that it is never
    trained on. Default: `required` in sessions of rollouts, `best_effort` in others."""
    cluster_port: int = Field(0, ge=0, le=65535)
    """Port of the gateways on the nodes of a Ray cluster; 0 takes any free port."""
    max_body_mb: int = Field(32, ge=1)
    """Size limit of a request body in MiB."""
    limits: GatewayLimits = GatewayLimits()
    """Limits that keep one client from stopping the gateway for all others."""
    calls_in_memory: int = Field(50_000, ge=1)
    """Number of recorded calls whose digests are kept in memory (about 2 KB each), to find the call that a new one
    extends. Above this number, sessions without a request for half a minute are removed from memory, and read from the
    database when they are used again."""
    cache_mb: int = Field(256, ge=1)
    """Memory in MiB for the last request of each session and the tokens of answers that may be continued. Two more
    caches each have a limit of the same size: one holds hashes that show which messages and tokens of a session are
    stored already, the other holds answers of hosted models that the provider signed. If a session does not fit into
    the caches, the gateway parses and hashes each call from the beginning. This takes several times as long."""
    heartbeat_seconds: float = Field(15.0, gt=0)
    """Send a comment line on a stream that has been silent for this long. Google's streams get none."""
    headers_after_seconds: float = Field(2.0, ge=0)
    """Send the headers of a stream after this time even if no token has arrived. An error can have its own HTTP status
    only before the headers are sent."""
    first_token_seconds: float = Field(1800.0, gt=0)
    """Time limit for a call's first token (or the whole answer, if the engine sends it in one piece), including the
    wait in the engine's queue and the prefill. After that the call fails, and the agent gets status 504."""
    next_token_seconds: float = Field(600.0, gt=0)
    """Time limit for each further token, including pauses in which the engine loads new weights. If the next token does
    not come within this time, the call fails."""
    join_retries: Literal["evidence", "always", "never"] = "evidence"
    """Whether a request gets the answer of an earlier, equal request. `evidence`: only if the request is known to be a
    retry, because the earlier request lost its client or the SDK's retry header says so. `always`: also if the earlier
    request is still being answered, or was answered within `retry_window_seconds`. `never`: no request gets
    an earlier answer."""
    retry_window_seconds: float = Field(10.0, ge=0)
    """How long an answer is kept after its end. If an equal request comes within this time and counts as a retry (see
    `join_retries`), it gets the kept answer."""
    retry_grace_seconds: float = Field(2.0, ge=0)
    """How long to continue an answer after its client disconnected, so that a retry can take it over."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature for sessions that do not set one themselves. Their calls are then sampled without top_p,
    top_k, min_p, penalties and logit_bias, even if the agents ask for them. Without this setting, the traces of agents
    that ask for these parameters are at best `approximate`."""
    prompt_mode: PromptMode = "continue"
    """`continue`: if possible, a prompt is the exact tokens of the call that it extends, followed by the tokens of the
    new messages. `render`: the engine renders every request from its messages."""
    past_reasoning: Literal["keep", "strip"] = "keep"
    """Reasoning of earlier turns in continued prompts. `keep`: leave it as it was sampled. `strip`: if the model's chat
    template drops this reasoning, do not continue the prompt; the engine then renders the whole request."""
    prices: Path | None = None
    """A file with the prices of hosted models, used in place of the one that Polar ships
    (polar_proxy/assets/prices.toml)."""
    model_hosts: frozenset[str] = frozenset()
    """Further host names to intercept in sandboxes, for example a name that a provider gave to you alone, such as
    my-resource.openai.azure.com. `polar intercept` needs no such list."""
    provider_tools: Literal["remove", "refuse", "allow"] = "allow"
    """Tools in a request that the model's provider would run itself, such as a web search or a code interpreter. They
    are recorded with the call. `allow`: the engine `passthrough` passes the tools on, and the answers are never
    trained; other engines do not offer the tools to the model. `refuse`: the request is refused with status 400.
    `remove`: the tools are not offered to any model. `passthrough` changes no request, so with `remove` a server with
    this engine does not start."""
    hooks: str | None = None
    """A class of your own, as module:Class, that changes requests or answers (polar_proxy/gateway/hooks.py). Tasks and
    requests cannot set a hook."""
    hook_seconds: float = Field(10.0, gt=0)
    """How long a hook may take. A call whose hook takes longer fails."""
    normalisers_off: frozenset[str] = frozenset()
    """Names of normalisers to switch off. A normaliser is a rule in polar_proxy/sessions/hashing.py that ignores one
    kind of difference between messages when a call is compared with earlier ones."""


class EngineSettings(_Section):
    """The inference engine."""

    kind: str = "local"
    """`local`, `vllm`, `llamacpp` (a llama-server), `openai` (or a compatible API), `anthropic`, `google`,
    `passthrough` (each call goes to the provider that the agent addresses), or module:Class."""
    url: str | None = None
    """URL of the engine (all kinds but `local`). Default for openai, anthropic and google: the provider's own API."""
    model: str | None = None
    """local: a folder of weights, by default the bundled polar-tiny. Others: the name of the served model."""
    api_key: str | None = Field(None, repr=False)
    """Key for the engine (all kinds but `local`). Best set as POLAR_ENGINE__API_KEY; Polar never writes it anywhere.
    Default for openai, anthropic and google: the variable that the provider's own SDK reads (OPENAI_API_KEY,
    ANTHROPIC_API_KEY, GEMINI_API_KEY or GOOGLE_API_KEY)."""
    model_folder: str | None = None
    """For `vllm`: a folder with the model's configuration, tokenizer and chat template, if the server's own folder is
    on another machine. With a folder, Polar renders conversations itself. Without one, Polar asks the server, several
    times per call."""
    vllm_python: str | None = None
    """For `vllm`: the Python of an environment in which vLLM is installed. Polar needs vLLM's parsers to read answers
    of models whose tool calls are not in Hermes' format. Default: the Python of the `vllm` command, or Polar's own if
    it has vLLM."""
    vllm_parsers: str | None = None
    """For `vllm`: the names of the server's tool parser and reasoning parser as given to `vllm serve`, in the form
    TOOL/REASONING; either may be empty. Needed only if the model needs vLLM's parsers (see `vllm_python`) and Polar's
    tests of the server do not show which parsers the server uses."""


class RouteSettings(_Section):
    """A rule that sends calls to one of the engines in [engines]. The first rule whose conditions all hold decides. A
    call that no rule matches is answered by the engine of [engine]."""

    name: str = Field(min_length=1, max_length=64)
    """The rule's name, which is recorded with each call that it sends."""
    engine: str
    """Name of the engine in [engines]."""
    models: tuple[str, ...] = ()
    """Only calls whose request names one of these models, such as the model of a sub-agent. `*` matches any text."""
    labels: tuple[str, ...] = ()
    """Only sessions with one of these labels. `*` matches any text."""
    share: float = Field(1.0, gt=0, le=1)
    """Only this share of the sessions, from 0 to 1. The session's id decides, so the condition has the same result for
    all calls of a session."""


class RunSettings(RolloutSpec):
    """Defaults for rollouts, which a command or request may override, and limits on how many run."""

    concurrency: int = Field(2, ge=1)
    """Maximum number of rollouts that run at a time."""
    samples: int = Field(1, ge=1)
    """Number of rollouts of each task. Together they are a group."""
    backlog: int | None = Field(None, ge=1)
    """Start no new rollouts while this many finished groups wait for a trainer. Default: no limit."""
    prebuild: bool = False
    """In docker sandboxes, build each agent into an image (`polar harness prebuild`) instead of mounting its files.
    Needed if the Docker engine cannot see this machine's disk."""

    def job_spec(self, **given: Any) -> JobSpec:
        """Return a job with the options in `given`, and with these settings as defaults for all others."""
        return JobSpec(**{**self.model_dump(include=set(JobSpec.model_fields)), **given})


class SandboxSettings(_Section):
    """Sandboxes of agents and evaluators. A task may set its own memory, processors and disk."""

    memory_mb: int = Field(4096, ge=64)
    """MiB of memory for an agent. An evaluator gets half."""
    disk_mb: int = Field(8192, ge=64)
    """Maximum size in MiB of the files in home, workspace and further folders. Where Polar runs as root, a bubblewrap
    sandbox gets a file system of this size, and writing fails when it is full. In all other sandboxes, the agent is
    stopped when its files exceed this size."""
    files: int = Field(500_000, ge=1000)
    """Maximum number of files and folders in home, workspace and further folders."""
    processes: int = Field(1024, ge=16)
    """Maximum number of processes and threads at a time; not enforced in process sandboxes."""
    open_files: int = Field(16_384, ge=64)
    """Maximum number of open files of each process."""
    self_test: Literal["refuse", "warn", "off"] = "refuse"
    """Before a kind of sandbox is first used, test whether programs can break out of it. The default kind is tested as
    soon as a service starts; `process`, which isolates nothing, is never tested. `refuse`: do not use a kind that
    programs can break out of. `warn`: use it and log a warning. `off`: do not test."""
    docker_runtime: Literal["auto", "runc", "runsc"] = "auto"
    """Runtime of Docker containers. `auto`: gVisor (`runsc`) if the engine has it, otherwise the engine's default."""
    build_network: bool = False
    """Let `docker build` of a task's image use the network, even if the task does not ask for it."""
    build_memory_mb: int = Field(4096, ge=64)
    """MiB of memory for building a task's image."""
    build_cpus: float = Field(2.0, gt=0)
    """Number of processors for building a task's image."""
    build_seconds: float = Field(1800.0, gt=0)
    """Time limit of building a task's image."""


class LogSettings(_Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] | None = None
    """Lowest level that is logged. `warning` includes failed calls. `info` adds a line for each session, each stage of
    a rollout and each broken-off call. `debug` adds answered calls and refused requests. Default: info for
    `polar serve` and Ray nodes, warning for `polar run`. Other commands log warnings as text."""
    format: Literal["text", "json"] = "text"
    """`text`: lines for people. `json`: one JSON object per line, with the ids in separate fields."""


class TelemetrySettings(_Section):
    """OpenTelemetry traces of rollouts, stages and calls (`pip install 'polar-proxy[otel]'`)."""

    endpoint: str | None = None
    """URL to which traces are sent over OTLP/HTTP, with its path, such as http://127.0.0.1:4318/v1/traces. Without it,
    nothing is traced."""
    headers: dict[str, str] = Field({}, repr=False)
    """Headers of the requests to the endpoint, such as a key. Polar never writes them anywhere."""
    content: bool = False
    """Also send the messages of calls, shortened. They may hold anything that an agent read."""
    queue: int = Field(2048, ge=1)
    """Number of calls and rollouts that may wait for the endpoint. Further ones are not traced."""
    service_name: str = "polar"
    """The name of this server in the traces."""


class ApiSettings(_Section):
    """The HTTP API."""

    folders: tuple[Path, ...] = ()
    """Folders of this machine from which jobs may take task files, repositories, images to build and mounts. If the
    list is empty, a job must contain its tasks, or name a built-in family (such as swe-task) or a task source that
    `allowed_code` lists. Commands without --url are not limited."""
    private_callbacks: bool = False
    """Also send callbacks to loopback, private and link-local addresses."""
    callback_secret: str | None = Field(None, repr=False)
    """Secret that signs callbacks: `whsec_` and base64. By default it is created in the file callback-secret in the
    home. It is never written to the database."""
    callback_attempts: int = Field(8, ge=1)
    """Give up on a callback after this many attempts."""
    callback_pause_seconds: float = Field(5.0, gt=0)
    """Pause before the second attempt; each further pause is four times as long."""
    callback_timeout_seconds: float = Field(15.0, gt=0)
    """How long to wait for the receiver of a callback."""


class AdmissionSettings(_Section):
    """Conditions under which a server starts no further agent. If no agent runs, one is always started."""

    engine_kv: float = Field(0.5, gt=0, le=1)
    """Start no new agent while more than this share of the KV cache, from 0 to 1, is in use (vLLM reports the share).
    The conversations of agents that wait for a tool do not count as used. They should stay cached, so leave room for
    them. 1 disables the check."""
    engine_queue: int = Field(16, ge=0)
    """Start no new agent while more than this number of requests per engine replica wait in the engine's queue (vLLM
    reports them)."""
    memory_mb: int = Field(768, ge=0)
    """MiB of memory to reserve for a rollout whose task does not say how much it needs. 0: start rollouts without
    checking how much memory is free, whatever their tasks say."""
    memory_reserve_mb: int = Field(512, ge=0)
    """MiB of memory to keep free."""


class Settings(BaseSettings):
    """All settings: those at the top level, and the sections."""

    model_config = SettingsConfigDict(
        env_prefix="POLAR_",
        env_nested_delimiter="__",
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    home: Path = Path("~/.polar")
    """Folder of the database, keys, installed harnesses and training runs. Set it as POLAR_HOME."""
    db: str | None = None
    """Database URL or file; by default polar.db in the home."""
    url: str | None = None
    """URL of the server that commands talk to. Without it, commands use the database directly."""
    api_key: str | None = Field(None, repr=False)
    """Key for the server at `url`. Default on the server's own machine: the key in the file api-key in the home."""
    harnesses: Path | None = None
    """Folder of the installed harnesses; by default harnesses/ in the home."""
    allowed_code: frozenset[str] = frozenset()
    """Python objects, each as module:object, that tasks, requests and stored rollouts may refer to: functions that
    score or parse logs, task sources, agents. Polar imports no other code that a task, a request or a stored rollout
    names."""
    gateway: GatewaySettings = GatewaySettings()
    """Section [gateway]: the HTTP server that agents send their model calls to."""
    engine: EngineSettings = EngineSettings()
    """Section [engine]: the inference engine that answers calls to which no route applies."""
    engines: dict[Annotated[str, Field(pattern=r"[a-z0-9][a-z0-9_-]{0,63}")], EngineSettings] = {}
    """Further engines by name, each with the settings of [engine], for the rules in `routes`."""
    routes: tuple[RouteSettings, ...] = ()
    """Rules that send calls to the engines in [engines]."""
    run: RunSettings = RunSettings()
    """Section [run]: defaults for rollouts, and limits on how many run."""
    admission: AdmissionSettings = AdmissionSettings()
    """Section [admission]: conditions under which a server starts no further agent."""
    sandboxes: SandboxSettings = SandboxSettings()
    """Section [sandboxes]: limits and tests of the sandboxes of agents and evaluators."""
    api: ApiSettings = ApiSettings()
    """Section [api]: the HTTP API, and the callbacks that it sends."""
    log: LogSettings = LogSettings()
    """Section [log]: level and format of the log."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """Section [telemetry]: OpenTelemetry traces."""

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

    def code(self, *named: str) -> AllowedCode:
        """Return the Python code that tasks, requests and stored rollouts may refer to.

        This is the code in `allowed_code`. The agent of [run] and the names in `named` are added if they have the form
        module:object.
        """
        return AllowedCode(self.allowed_code.union(name for name in (self.run.harness, *named) if is_code(name)))

    @field_validator("routes")
    @classmethod
    def _check_routes(cls, routes: tuple[RouteSettings, ...], info: ValidationInfo) -> tuple[RouteSettings, ...]:
        engines = info.data.get("engines", {})  # missing if it is itself invalid
        names = [route.name for route in routes]
        for route in routes:
            if "engines" in info.data and route.engine not in engines:
                known = ", ".join(sorted(engines)) or "none"
                raise ValueError(
                    f"the route {route.name} names the engine {route.engine}, which [engines] does not define; "
                    f"it defines: {known}"
                )
            if names.count(route.name) > 1:
                raise ValueError(f"two routes have the name {route.name}")
        return routes

    def model_post_init(self, context: Any, /) -> None:
        self.home = self.home.expanduser().absolute()

    @property
    def harness_cache(self) -> Path:
        return (self.harnesses or self.home / "harnesses").expanduser().absolute()


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_url(host: str, port: int) -> str:
    """Return the URL by which programs on this machine reach a server that listens on `host` and `port`."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


_PROVIDER_KEYS = {
    "openai": ("OPENAI_API_KEY",),
    "anthropic": ("ANTHROPIC_API_KEY",),
    "google": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
}


def provider_key(engine: EngineSettings) -> str | None:
    """Return the key for an engine: the setting `api_key`. If it is not set, return the environment variable that the
    provider's SDK reads."""
    if engine.api_key is not None:
        return engine.api_key
    return next((key for name in _PROVIDER_KEYS.get(engine.kind, ()) if (key := os.environ.get(name))), None)


def child_environment(added: Mapping[str, str], *, without: Collection[str] = ()) -> dict[str, str]:
    """Return the environment for a child process: this process's own, minus the variables `without`, plus `added`."""
    return {**{name: value for name, value in os.environ.items() if name not in without}, **added}


def start_no_blas_threads() -> None:
    """Keep NumPy's linear algebra from starting threads. Their busy waiting takes a tenth of a short command's time.

    Call it before NumPy is imported, and only in commands that start no other programs, because programs inherit the
    setting from the command.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
