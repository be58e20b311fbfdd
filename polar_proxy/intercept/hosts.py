"""A table of the hosts of model providers: which of their paths are model calls, and how other paths are answered.

The first rule whose pattern matches the whole path decides. If Polar answers in place of the provider, a path without a
rule is refused with status 404 (except on hosts with `ModelHost.others_pass`). The tested programs then treat the
feature as switched off.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from polar_proxy.errors import UsageError
from polar_proxy.types import Json

INTERCEPT_PREFIX = "/intercept/"
"""Prefix of the gateway's paths for intercepted requests: `/intercept/HOST/PATH`, or `/s/KEY/intercept/HOST/PATH` with
a session's key."""


@dataclass(frozen=True, slots=True)
class PathRule:
    """A rule for requests whose whole path matches the regular expression `path`."""

    path: str
    route: str | None = None
    """The gateway's route that serves these requests. `\\1` is replaced by the first group of `path`. The route decides
    the dialect."""
    passed_on: bool = True
    """Used if `route` is set and the provider itself answers the calls of `polar intercept`. True: the requests reach
    the provider through the gateway's passthrough engine. False: they go directly to the provider."""
    body: Json | None = None
    """Used without `route`: the JSON object to answer with. `{name}` in a string is replaced by the request's header
    `name`."""


@dataclass(frozen=True, slots=True)
class ModelHost:
    """Hosts of one provider that serve the same paths."""

    provider: str
    hosts: tuple[str, ...]
    """Host names. `*` matches letters, digits and hyphens, but no dot."""
    rules: tuple[PathRule, ...]
    wildcard_values: tuple[str, ...] = ()
    """Known values of `*`, such as regions. /etc/hosts cannot hold patterns. So in sandboxes, Polar intercepts only the
    host names that have one of these values in place of `*`, and the host names in `gateway.model_hosts`."""
    others_pass: bool = False
    """True for hosts that serve more than models: if no rule matches a request, `polar intercept` sends the request to
    the host itself."""

    def names(self) -> tuple[str, ...]:
        """Return the full names of these hosts, with the known values of `*`."""
        plain = [host for host in self.hosts if "*" not in host]
        patterns = [host for host in self.hosts if "*" in host]
        return (*plain, *(host.replace("*", value) for host in patterns for value in self.wildcard_values))


_OPENAI_CALLS = r"chat/completions|completions|responses(?:/compact)?"
_RESPONSES = r"responses(?:/[^/]+(?:/input_items|/cancel)?)?"
_OPENAI_STATE = rf"{_RESPONSES}|conversations(?:/[^/]+(?:/items(?:/[^/]+)?)?)?"
_OPENAI_MODELS = r"models(?:/.+)?"
_AWS_REGIONS = (
    *("us-east-1", "us-east-2", "us-west-1", "us-west-2", "ca-central-1", "sa-east-1"),
    *("eu-central-1", "eu-central-2", "eu-north-1", "eu-south-1", "eu-south-2", "eu-west-1", "eu-west-2", "eu-west-3"),
    *("ap-east-2", "ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-south-2"),
    *("ap-southeast-1", "ap-southeast-2", "ap-southeast-3", "ap-southeast-4", "me-central-1", "il-central-1"),
)
_GOOGLE_REGIONS = (
    *("us-central1", "us-east1", "us-east4", "us-east5", "us-south1", "us-west1", "us-west4"),
    *("europe-central2", "europe-north1", "europe-southwest1", "europe-west1", "europe-west2", "europe-west3"),
    *("europe-west4", "europe-west8", "europe-west9", "asia-east1", "asia-east2", "asia-northeast1"),
    *("asia-northeast3", "asia-south1", "asia-southeast1", "australia-southeast1", "me-central1"),
)
_CHATGPT_ACCOUNTS = {
    "accounts": [
        {
            "id": "{chatgpt-account-id}",
            "name": "Personal",
            "structure": "personal",
            "plan_type": "pro",
            "can_access_with_session": True,
            "is_deactivated": False,
            "is_fedramp_compliant_workspace": False,
            "workspace_backend_origin": "https://chatgpt.com",
            "account_routing_override": "us",
        }
    ],
    "default_account_id": "{chatgpt-account-id}",
    "account_ordering": ["{chatgpt-account-id}"],
}
_COPILOT_USER = {
    "login": "polar",
    "copilot_plan": "individual",
    "access_type_sku": "plus_yearly_subscriber_quota",
    "chat_enabled": True,
    "endpoints": {"api": "https://api.githubcopilot.com", "telemetry": "https://api.githubcopilot.com"},
    "organization_login_list": [],
    "organization_list": [],
}
_COPILOT_MODEL = {
    "id": "claude-sonnet-5",
    "name": "The model of Polar's engine",
    "object": "model",
    "vendor": "Anthropic",
    "version": "claude-sonnet-5",
    "preview": False,
    "model_picker_enabled": True,
    "is_chat_default": True,
    "policy": {"state": "enabled", "terms": ""},
    "billing": {"is_premium": False, "multiplier": 0},
    "supported_endpoints": ["/chat/completions"],
    "capabilities": {
        "type": "chat",
        "object": "model_capabilities",
        "family": "claude-sonnet-5",
        "tokenizer": "o200k_base",
        "limits": {"max_context_window_tokens": 128_000, "max_prompt_tokens": 112_000, "max_output_tokens": 16_000},
        "supports": {"streaming": True, "tool_calls": True, "parallel_tool_calls": True},
    },
}

MODEL_HOSTS: tuple[ModelHost, ...] = (
    ModelHost(
        "OpenAI",
        ("api.openai.com", "*.api.openai.com"),
        (
            PathRule(rf"/v1/({_OPENAI_CALLS}|{_OPENAI_STATE})", r"/v1/\1"),
            PathRule(rf"/v1/({_OPENAI_MODELS})", r"/v1/\1", passed_on=False),
        ),
        wildcard_values=("us", "eu"),
    ),
    ModelHost(
        "ChatGPT",  # Codex that is signed in
        ("chatgpt.com",),
        (
            PathRule(rf"/backend-api/codex/({_RESPONSES})", r"/v1/\1"),
            # Without its workspace Codex makes no call.
            PathRule(r"/backend-api/wham/accounts/check", body=_CHATGPT_ACCOUNTS),
            PathRule(r"/(?:backend-api/)?(?:ces/.*|codex/analytics-events/.*|o11y/.*)", body={}),  # telemetry
        ),
    ),
    ModelHost(
        "Anthropic",
        ("api.anthropic.com",),
        (
            PathRule(r"(/v1/messages(?:/count_tokens)?)", r"\1"),
            PathRule(r"(/v1/models(?:/.+)?|/api/hello)", r"\1", passed_on=False),
            PathRule(r"/api/event_logging/.*", body={}),
            PathRule(r"/api/claude_code/(?:metrics|organizations/metrics_enabled)", body={"metrics_enabled": False}),
        ),
    ),
    ModelHost(
        "Google AI",
        ("generativelanguage.googleapis.com",),
        (
            PathRule(r"(/v1[a-z0-9]*/(?:models|tunedModels)/[^/]+:(?:generate|streamGenerate)Content)", r"\1"),
            PathRule(r"(/v1[a-z0-9]*/models(?:/.+)?)", r"\1", passed_on=False),
            PathRule(rf"/v1[a-z0-9]*/openai/({_OPENAI_CALLS})", r"/v1/\1"),
        ),
    ),
    ModelHost("Google telemetry", ("play.googleapis.com",), (PathRule(r"/log", body={}),), others_pass=True),
    ModelHost(
        "Google Vertex",
        ("aiplatform.googleapis.com", "*-aiplatform.googleapis.com"),
        (
            PathRule(r"(/v1[a-z0-9]*/(?:projects/.+/)?publishers/google/models/[^/]+:\w*[gG]enerateContent)", r"\1"),
            PathRule(r"(/v1[a-z0-9]*/(?:projects/.+/)?publishers/anthropic/models/[^/]+:\w*[rR]awPredict)", r"\1"),
            PathRule(r"(/v1[a-z0-9]*/(?:projects/.+/)?publishers/google/models/[^/]+:countTokens)", r"\1"),
            PathRule(rf"/v1[a-z0-9]*/projects/.+/endpoints/openapi/({_OPENAI_CALLS})", r"/v1/\1"),
        ),
        wildcard_values=_GOOGLE_REGIONS,
    ),
    ModelHost(
        "Azure",
        ("*.openai.azure.com", "*.cognitiveservices.azure.com", "*.services.ai.azure.com"),
        (
            PathRule(rf"/openai/deployments/[^/]+/({_OPENAI_CALLS})", r"/v1/\1"),
            PathRule(rf"/openai/(?:v1/)?({_OPENAI_CALLS}|{_OPENAI_STATE})", r"/v1/\1"),
            PathRule(rf"/openai/(?:v1/)?({_OPENAI_MODELS})", r"/v1/\1", passed_on=False),
            PathRule(r"/models/chat/completions", "/v1/chat/completions"),
            PathRule(r"/anthropic/v1/messages", "/v1/messages"),
        ),
    ),
    ModelHost(
        "Bedrock",  # its form of Anthropic Messages
        ("bedrock-runtime.*.amazonaws.com",),
        (PathRule(r"(/model/.+/invoke(?:-with-response-stream)?)", r"\1"),),
        wildcard_values=_AWS_REGIONS,
    ),
    ModelHost(
        "OpenRouter",
        ("openrouter.ai",),
        (
            PathRule(rf"/api/v1/({_OPENAI_CALLS}|messages)", r"/v1/\1"),
            PathRule(r"/api/v1/(models(?:/.+)?)", r"/v1/\1", passed_on=False),
        ),
    ),
    ModelHost(
        "Mistral",
        ("api.mistral.ai", "codestral.mistral.ai"),
        (
            PathRule(r"/v1/chat/completions", "/v1/chat/completions"),
            PathRule(r"(/v1/models(?:/.+)?)", r"\1", passed_on=False),
        ),
    ),
    ModelHost(
        "GitHub",  # where Copilot asks for its account and its endpoint
        ("api.github.com",),
        (PathRule(r"/copilot_internal/user", body=_COPILOT_USER), PathRule(r"/copilot_internal/.*", body={})),
        others_pass=True,
    ),
    ModelHost(
        "GitHub Copilot",
        ("api.githubcopilot.com", "api.*.githubcopilot.com"),
        (
            PathRule(rf"(?:/v1)?/({_OPENAI_CALLS}|messages)", r"/v1/\1"),
            # It uses only models that it knows.
            PathRule(r"/models", body={"object": "list", "data": [_COPILOT_MODEL]}),
            PathRule(r"/telemetry.*", body={}),
        ),
        wildcard_values=("individual", "business", "enterprise"),
    ),
)


class InterceptedPath(NamedTuple):
    """A path of a model host. `rule`: the rule that matches the path, or None."""

    host: ModelHost
    rule: PathRule | None
    route: str | None
    """The gateway's route; None if the gateway does not serve the path."""


@lru_cache(maxsize=1024)
def find_host(name: str) -> ModelHost | None:
    """Return the entry for a host name (lower case, without port); None if it is not a model host."""
    return next((row for row in MODEL_HOSTS if any(re.fullmatch(_pattern(one), name) for one in row.hosts)), None)


def find_path(name: str, path: str, *, names: Container[str] | None = None) -> InterceptedPath | None:
    """Find the rule for a path of the host `name`. Returns None if `name` is no model host. `path` has no query.

    `names`: the names that count as model hosts (`host_names`). If None, every name that a pattern matches counts.
    """
    row = find_host(name.lower())
    if row is None or (names is not None and name.lower() not in names):
        return None
    for rule in row.rules:
        if (found := re.fullmatch(rule.path, path)) is not None:
            return InterceptedPath(row, rule, None if rule.route is None else found.expand(rule.route))
    return InterceptedPath(row, None, None)


def host_names(own: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the full names of all model hosts, for /etc/hosts in a sandbox.

    `own`: names that a provider gave to the user (`gateway.model_hosts`). Raises UsageError if one of them is not the
    name of a model host.
    """
    added = sorted(name.lower() for name in own)
    for name in added:
        if find_host(name) is None:
            patterns = ", ".join(host for row in MODEL_HOSTS for host in row.hosts if "*" in host)
            raise UsageError(
                f"{name} in gateway.model_hosts is not the name of a model host. A name must match one of {patterns}."
            )
    return tuple(dict.fromkeys([*(name for row in MODEL_HOSTS for name in row.names()), *added]))


def rules_for_proxy(*, record: bool) -> list[Json]:
    """Return a table for the proxy's addon: patterns of hosts, and of the paths that the addon sends to the gateway.

    `record`: True if the provider itself answers. Then only the paths marked `passed_on` go through the gateway; all
    other requests go directly to the provider.
    """
    return [
        {"hosts": [_pattern(name) for name in host.hosts], "paths": _paths_for_gateway(host, record)}
        for host in MODEL_HOSTS
    ]


def _paths_for_gateway(host: ModelHost, record: bool) -> list[str]:
    if record:
        return [rule.path for rule in host.rules if rule.route is not None and rule.passed_on]
    return [*(rule.path for rule in host.rules), *(() if host.others_pass else (".*",))]


def _pattern(host: str) -> str:
    return re.escape(host).replace(r"\*", r"[a-z0-9-]+")
