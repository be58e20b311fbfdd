"""`llamacpp`: a llama-server as an engine. Tested with the llama.cpp of llama-cpp-python 0.3.36."""

from polar_proxy.engines.llamacpp.engine import LlamaCppEngine

__all__ = ["LlamaCppEngine"]
