"""Where a call stands in its session: message chain, placement, edges."""

from polar_proxy.history.place import Place, SessionHistory

__all__ = ["Place", "SessionHistory"]
