"""What a server's chat template does to a conversation, seen through the server's routes."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from polar_proxy.engines.openai_client import OpenAIClient
from polar_proxy.engines.vllm.parser_proof import TOOL, USER
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import Json

_END_TOKENS = 4
"""So many tokens behind a message are tried as the one that ends it."""
_CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a"}'}}
_CANONICAL: list[Json] = [
    {"role": "system", "content": "You are terse."},
    *USER,
    {"role": "assistant", "content": "Wait.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1 2 3"},
    {"role": "assistant", "content": "One, two, three."},
    {"role": "user", "content": "Again."},
]


class TemplateProbe:
    def __init__(self, http: OpenAIClient, model: str, chat: Callable[..., Awaitable[Json]]) -> None:
        """`chat(**fields)` asks the chat route for one token."""
        self._http = http
        self._model = model
        self._chat = chat

    async def rendered(self, messages: list[Json], **more: Any) -> list[int]:
        body = {"model": self._model, "messages": messages, "add_generation_prompt": True, **more}
        answer = await self._http.json("POST", "/tokenize", body)
        return list(answer.get("tokens") or [])

    async def hash(self, tokenize: bool) -> str | None:
        """`render:` and a hash of the ids of a canonical conversation, as a server does not show its template.

        It changes with the template and with the tokenizer. Templates that cannot take a part of the conversation
        (a system message, tools) are hashed over what they take.
        """
        for messages, more in ((_CANONICAL, {"tools": [TOOL]}), (_CANONICAL[-2:], {}), (USER, {})):
            try:
                if tokenize:
                    ids = await self.rendered(messages, **more)
                else:
                    ids = (await self._chat(messages=messages, return_token_ids=True, **more))["prompt_token_ids"]
            except (RequestError, EngineError):
                continue
            return "render:" + hashlib.sha256(np.asarray(ids, dtype="<i4").tobytes()).hexdigest()[:32]
        return None

    async def end_of_turn(self) -> tuple[int, ...]:
        """The id that ends an answer: the first by which a finished and an unfinished last message differ and at which
        the server stops by itself when it is forced to be sampled.

        A template may write more behind a message than the token that ends it (a line break in front of it, say).
        """
        turn = [*USER, {"role": "assistant", "content": "One"}]
        try:
            closed = await self.rendered(turn, add_generation_prompt=False)
            still_open = await self.rendered(turn, add_generation_prompt=False, continue_final_message=True)
        except (RequestError, EngineError):
            return ()
        same = next((at for at, (a, b) in enumerate(zip(closed, still_open, strict=False)) if a != b), len(still_open))
        for end in closed[same : same + _END_TOKENS]:
            answer = await self._chat(max_tokens=2, logit_bias={str(end): 100}, return_token_ids=True)
            choice = answer["choices"][0]
            # A second end token, from the model's generation config, is named as the reason.
            own = choice.get("stop_reason") in (None, end)
            if choice.get("finish_reason") == "stop" and own and choice.get("token_ids") == [end]:
                return (int(end),)
        return ()
