"""Where a call stands in its session: comparison by meaning, edges, retries, threads."""

from polar_proxy.sessions.base import Base
from polar_proxy.sessions.client_metadata import NO_METADATA, ClientMetadata, read_client_metadata
from polar_proxy.sessions.hashing import HashedConversation
from polar_proxy.sessions.history import Lineage, SessionHistory
from polar_proxy.sessions.normalisers import NORMALISERS, Normaliser
from polar_proxy.sessions.rules import BUILT_IN, RULES, Rule

__all__ = [
    "BUILT_IN",
    "NORMALISERS",
    "NO_METADATA",
    "RULES",
    "Base",
    "ClientMetadata",
    "HashedConversation",
    "Lineage",
    "Normaliser",
    "Rule",
    "SessionHistory",
    "read_client_metadata",
]
