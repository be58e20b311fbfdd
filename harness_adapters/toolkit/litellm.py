"""What every harness that asks through litellm is told, so that it asks nobody but the endpoint."""

from __future__ import annotations

from collections.abc import Mapping

LITELLM_ENV: Mapping[str, str] = {
    # Without it every start looks up a price list on the internet and waits for the failure.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_TELEMETRY": "False",
    "PYTHONUNBUFFERED": "1",
}
