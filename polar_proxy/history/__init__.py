"""Where a call stands in its session: comparison by meaning, edges, retries, threads."""

from polar_proxy.history.base import Base
from polar_proxy.history.hints import NO_HINTS, Hints, read_hints
from polar_proxy.history.meaning import Read
from polar_proxy.history.normalise import NORMALISERS, Normaliser
from polar_proxy.history.place import Place, SessionHistory
from polar_proxy.history.rules import BUILT_IN, RULES, Rule

__all__ = [
    "BUILT_IN",
    "NORMALISERS",
    "NO_HINTS",
    "RULES",
    "Base",
    "Hints",
    "Normaliser",
    "Place",
    "Read",
    "Rule",
    "SessionHistory",
    "read_hints",
]
