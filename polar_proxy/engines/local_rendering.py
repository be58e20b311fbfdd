"""Render a server's conversations in this process, if the result is equal to the server's own rendering.

The template comes from the model's folder (vLLM), or from the server (llama.cpp). The first conversation with a set of
tools and template options is rendered both here and by the server. If the ids (or texts) are equal, later conversations
with this set are rendered here. If they differ, the server renders them. Every 32nd conversation is compared again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, get_args

import orjson

from polar_proxy.engines.chat_template import MessageForm, ModelTemplate, ToolForm
from polar_proxy.engines.openai_client import ServerEngine
from polar_proxy.errors import RequestError
from polar_proxy.offload import OffloadThread
from polar_proxy.types import ChatRequest, Message, ToolCall

log = logging.getLogger(__name__)

_COMPARE_EVERY = 32
_LARGE_TEXT = 16_384
"""Texts of at least this many characters are encoded in a thread."""
_KEPT_COMPARISONS = 1024
_FORMS = tuple(
    MessageForm(parts, tools, drops)
    for drops in (False, True)
    for parts in (False, True)
    for tools in get_args(ToolForm)
)
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_TOOL = {
    "type": "function",
    "function": {"parameters": {"type": "object", "properties": {"path": {"type": "string"}}}, "name": "look"},
}
_CALL = ToolCall("abcdef123", "look", '{"path":"a"}')
_CONVERSATION = (
    Message("system", "x-anthropic-billing-header: a\nYou are terse."),
    Message("user", [{"type": "text", "text": "Look."}, {"type": "text", "text": "Twice."}]),
    Message("assistant", None, tool_calls=(_CALL,)),
    Message("tool", "1 2 3", tool_call_id=_CALL.id),
    Message("assistant", "It is 1 2 3.", reasoning="I see."),
    Message("user", "Again."),
)
"""A test conversation of six messages.

At the start, its first two messages, its first four messages and the whole conversation are rendered, both here and by
the server. The results must be equal. If the template refuses a rendering here, it must also fail at the server.
"""

Rendering = TypeVar("Rendering", list[int], str)
Render = Callable[..., Awaitable[Rendering]]


class LocalRenderer(Generic[Rendering]):
    """Renders conversations with the model's template. Use `find` to make one."""

    def __init__(
        self,
        template: ModelTemplate,
        form: MessageForm,
        server_render: Render[Rendering],
        encode: Callable[[str], Rendering],
    ) -> None:
        """`server_render` returns the server's rendering, as ids or text. `encode` converts a text that was rendered
        here to the same type."""
        self._template = template
        self._encode: Callable[[str], Rendering] = encode
        self._form = form
        self._server_render: Render[Rendering] = server_render
        self._equal: dict[bytes, bool] = {}
        """Result of the last comparison, by `_key`."""
        self._last_key: tuple[tuple[object, object], bytes] = (None, None), b""
        self._count = 0
        self._thread = OffloadThread("render")

    @classmethod
    async def find(
        cls, template: ModelTemplate, server_render: Render[Rendering], encode: Callable[[str], Rendering]
    ) -> LocalRenderer[Rendering] | None:
        """Return a renderer with the `MessageForm` that gives the server's renderings of the test conversation.

        Returns None if no form gives equal renderings.
        """
        requests = [ChatRequest("", _CONVERSATION[:end], tools=tools) for end in (2, 4, 6) for tools in ((), (_TOOL,))]
        expected = [await _unless_refused(server_render(request)) for request in requests]
        expected_unopened = await _unless_refused(server_render(requests[-1], generation=False))
        for form in _FORMS:
            renderer = cls(template, form, server_render, encode)
            rendered = [renderer._local_render(request) for request in requests]
            if rendered == expected and renderer._local_render(requests[-1], generation=False) == expected_unopened:
                return renderer
        log.info(
            "the server renders conversations differently from its model's template, so the server renders all of them"
        )
        return None

    def close(self) -> None:
        self._thread.close()

    async def matches_server(self, requests: Sequence[ChatRequest]) -> bool:
        """Return whether this process renders these requests as the server does.

        All requests must have the same tools and template options. If Polar already compared a request with the
        same tools and options, return that result; otherwise compare the last request. A conversation with an unusual
        role never matches.
        """
        if not all(message.role in _ROLES for request in requests for message in request.messages):
            return False
        last = requests[-1]
        equal = self._equal.get(self._key(last))
        return await self._compare(last) if equal is None else equal

    async def texts(self, requests: Sequence[ChatRequest], *, generation: bool = True) -> list[str]:
        render = self._template.render
        large = any(request.large for request in requests)
        return await self._thread.run(
            large, lambda: [render(one, self._form, generation=generation) for one in requests]
        )

    async def encode(self, text: str) -> Rendering:
        return await self._thread.run(len(text) > _LARGE_TEXT, self._encode, text)

    async def confirm(self, request: ChatRequest) -> bool:
        """Return whether the server renders this request as this process does.

        Only some requests are compared. For any other request, return the result of the last comparison with the same
        tools and template options.
        """
        self._count += 1
        equal = self._equal.get(self._key(request))
        return await self._compare(request) if equal is None or self._count % _COMPARE_EVERY == 0 else equal

    async def _compare(self, request: ChatRequest) -> bool:
        expected = await self._server_render(request)
        # In the thread even if the request is not large: a whole conversation is encoded, which takes milliseconds.
        equal = expected == await self._thread.run(True, self._local_render, request)
        if not equal:
            log.warning(
                "this process and the server render a conversation differently, so from now on the server renders "
                "conversations with the same tools and template options"
            )
        if len(self._equal) >= _KEPT_COMPARISONS:
            self._equal.clear()
        self._equal[self._key(request)] = equal
        return equal

    def _key(self, request: ChatRequest) -> bytes:
        """Return a digest of what a rendering depends on besides the messages.

        The last digest is kept, because one call needs it several times and hashing many tools takes 50 microseconds.
        """
        parts = request.tools, request.template_kwargs
        known, key = self._last_key
        if any(part is not other for part, other in zip(parts, known, strict=True)):
            value = orjson.dumps([request.tools, dict(request.template_kwargs)], option=orjson.OPT_SORT_KEYS)
            key = hashlib.blake2b(value, digest_size=16).digest()
            self._last_key = parts, key
        return key

    def _local_render(self, request: ChatRequest, *, generation: bool = True) -> Rendering | None:
        try:
            return self._encode(self._template.render(request, self._form, generation=generation))
        except RequestError:
            return None


async def _unless_refused(rendering: Awaitable[Rendering]) -> Rendering | None:
    try:
        return await rendering
    except RequestError:
        return None


class LocallyRenderingEngine(ServerEngine):
    """An engine behind a server. This process renders conversations if it was proved to render them as the server does;
    otherwise the server renders them."""

    _local: LocalRenderer[Any] | None = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._local is not None:
            self._local.close()
        await super().__aexit__(kind, error, trace)

    async def render_texts(self, requests: Sequence[ChatRequest], *, generation: bool = True) -> list[str]:
        if self._local is not None and await self._local.matches_server(requests):
            return await self._local.texts(requests, generation=generation)
        return await self._texts_of_server(requests, generation)

    async def _texts_of_server(self, requests: Sequence[ChatRequest], generation: bool) -> list[str]:
        return await super().render_texts(requests, generation=generation)

    async def confirm_rendering(self, request: ChatRequest, end: Sequence[int]) -> bool:
        if self._local is not None and await self._local.matches_server([request]):
            return await self._local.confirm(request)
        return await super().confirm_rendering(request, end)
