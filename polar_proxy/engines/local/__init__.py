"""The in-process engine (needs the `local` extra: torch, transformers)."""

from polar_proxy.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
