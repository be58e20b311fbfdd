"""A model client for mini-swe-agent that starts quickly: `--config model.model_class=direct_model.DirectModel`.

It is mini-swe-agent's own OpenRouter client, which uses `requests`, pointed at `OPENAI_API_BASE`. The default client
imports litellm, which takes five seconds of processor time before the first call, more than the rest of a rollout of
the bundled policy.
"""

import os
from typing import Any

from minisweagent.models.openrouter_model import OpenRouterModel


class DirectModel(OpenRouterModel):  # type: ignore[misc]
    """A client of an OpenAI-compatible endpoint."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{**config, "model_kwargs": {}})  # those arguments are for litellm, not for the endpoint
        self._api_url = os.environ["OPENAI_API_BASE"] + "/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
