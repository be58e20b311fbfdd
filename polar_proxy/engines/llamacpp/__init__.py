"""`llamacpp`: a llama-server as an engine. Verified on b9631's successors only by what they do; see `probe.py`."""

from polar_proxy.engines.llamacpp.engine import LlamaCppEngine

__all__ = ["LlamaCppEngine"]
