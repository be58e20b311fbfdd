"""The in-process engine: Transformers and PyTorch, for small models such as the bundled demo policy.

Needs the extra `local` (torch, transformers).
"""

from polar_proxy.engines.local.engine import LocalEngine

__all__ = ["LocalEngine"]
