"""Sessions: the state of one agent conversation, and how its next call relates to it.

The way of a call: `SessionRegistry.find` -> `SessionState.place` (lineage) -> `PromptBuilder.build` (continuation).
"""

from polar_proxy.sessions.continuation import PromptBuilder, PromptPlan, prompt_config
from polar_proxy.sessions.identity import (
    NO_METADATA,
    ClientMetadata,
    hash_key,
    key_of_request,
    new_key,
    read_client_metadata,
)
from polar_proxy.sessions.lineage import Lineage
from polar_proxy.sessions.registry import SessionClosedError, SessionRegistry
from polar_proxy.sessions.state import SessionState

__all__ = [
    "NO_METADATA",
    "ClientMetadata",
    "Lineage",
    "PromptBuilder",
    "PromptPlan",
    "SessionClosedError",
    "SessionRegistry",
    "SessionState",
    "hash_key",
    "key_of_request",
    "new_key",
    "prompt_config",
    "read_client_metadata",
]
