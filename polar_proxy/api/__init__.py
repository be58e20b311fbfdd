"""The HTTP API: jobs, rollouts, rewards, the trainer feed, training runs, and the server itself."""

from polar_proxy.api.app import create_api, create_router
from polar_proxy.api.background import BackgroundLoops
from polar_proxy.api.context import ApiContext, allow_all, local_admin_key, new_api_key

__all__ = [
    "ApiContext",
    "BackgroundLoops",
    "allow_all",
    "create_api",
    "create_router",
    "local_admin_key",
    "new_api_key",
]
