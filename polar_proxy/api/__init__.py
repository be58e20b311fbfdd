"""The HTTP API: submitting, watching and cancelling rollouts, rewards, and the trainer feed."""

from polar_proxy.api.app import create_api, create_router
from polar_proxy.api.context import Api
from polar_proxy.api.housekeeping import Housekeeping
from polar_proxy.api.keys import local_admin_key, new_api_key, trusted

__all__ = ["Api", "Housekeeping", "create_api", "create_router", "local_admin_key", "new_api_key", "trusted"]
