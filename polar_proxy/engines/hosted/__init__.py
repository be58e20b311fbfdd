"""Engines that call a provider's API in its own wire format: OpenAI (and compatible APIs), Anthropic and Google.

They return no token ids. Their calls are recorded as text with the provider's token counts and the price, and have the
status `no_tokens`. `polar rescore` turns them into off-policy rows with the tokens of another engine.

Promises, each with a test:

* The provider gets its own wire format, whatever the client's dialect. If this format has no field for an option,
  either the request is refused or the option's name is recorded with the call. `carried.py` says for which options.
* The provider's key comes from the settings or the environment, goes to the provider only, and is removed from errors.
* The client gets the status and the `retry-after` of the provider's error. But if the provider refuses the engine's
  key, the client gets 502, because the agent's own key is not at fault.
* A request is sent once. Retries and fallbacks are left to the client. The only exception: if a compatible API
  refuses a field, and its error names the field to use instead, the request is sent again with that field
  (`openai.py`). Such a refusal comes before any sampling.
"""
