"""The model client that mini-swe-agent is started with here: `--config model.model_class=direct_model.DirectModel`.

mini-swe-agent has several clients, and takes one by its import path. This one is its own OpenRouter client, which asks
with `requests`, pointed at `OPENAI_API_BASE`. Its usual client imports litellm, which takes five seconds of processor
time before the first call, more than all the rest of a rollout of the bundled policy.
"""

import os
from typing import Any

from minisweagent.models.openrouter_model import OpenRouterModel


class DirectModel(OpenRouterModel):  # type: ignore[misc]
    """Asks an OpenAI-compatible endpoint."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{**config, "model_kwargs": {}})  # what stands there is for litellm, not for the endpoint
        self._api_url = os.environ["OPENAI_API_BASE"] + "/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
