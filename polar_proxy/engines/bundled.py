"""The bundled policy polar-tiny: its name and limits, and a warning if an agent other than mini-swe-agent uses it."""

from __future__ import annotations

import logging

import orjson

from polar_proxy.config import EngineSettings
from polar_proxy.types import CallRecord

log = logging.getLogger(__name__)

POLAR_TINY_NAME = "polar-tiny"
MAX_ANSWER_TOKENS = 256
"""Maximum length of an answer in tokens. With mini-swe-agent the model's answers are shorter. With other agents, an
answer might never end without this limit."""
ABILITY = (
    "polar-tiny, the bundled policy, can only play `polar run swe-task` with mini-swe-agent, and ends each answer "
    "after 256 tokens. For other agents serve your own model: polar serve --engine llamacpp --engine-url URL (a "
    "llama-server, for example on a laptop), or --engine vllm --engine-url URL"
)
_ONLY_TOOL = "bash"
"""The only tool of mini-swe-agent."""


def is_bundled(settings: EngineSettings) -> bool:
    return settings.kind == "local" and settings.model in (None, POLAR_TINY_NAME)


class OtherAgentWarning:
    """Observer of calls. Logs one warning, at the first call that mini-swe-agent cannot have made."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, call: CallRecord) -> None:
        if not self._warned and not _may_be_mini_swe_agent(call):
            self._warned = True
            text = (
                "session %s is not mini-swe-agent's: the answers of polar-tiny are meaningless for it. They are cut, "
                "or its requests are refused because of max_tokens. %s"
            )
            log.warning(text, call.session_id, ABILITY)


def _may_be_mini_swe_agent(call: CallRecord) -> bool:
    tools = orjson.loads(call.tools or b"[]")
    if call.dialect != "openai_chat" or len(tools) != 1 or not isinstance(tools[0], dict):
        return False
    function = tools[0].get("function")
    return isinstance(function, dict) and function.get("name") == _ONLY_TOOL
