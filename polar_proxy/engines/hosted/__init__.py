"""Engines that call a provider's API in its own wire format: OpenAI (and compatible APIs), Anthropic and Google.

They return no token ids. Their calls are recorded as text with the provider's token counts and the price, and have the
status `no_tokens`. `polar rescore` turns them into off-policy rows with the tokens of another engine.

Promises, each with a test:

* The provider gets its own wire format, whatever the client's dialect. An option that this format has no field for is
  refused, or is named by `not_carried` and recorded with the call (`carried.py` lists both).
* The provider's key comes from the settings or the environment, goes to the provider only, and is removed from errors.
* An error keeps its status, except that a refused key is 502: the agent's own key is not at fault. `retry-after` is
  handed on.
* A request is sent once. Retries and fallbacks are left to the client. The one exception: if a compatible API refuses
  a field and names the one that it wants, the request is sent again with that field (`openai.py`). Such a refusal
  comes before any sampling.
"""
