"""Conversations are rendered in this process only where this gives the server's ids."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from polar_proxy.engines.chat_template import MessageForm, ModelFiles, ToolForm
from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.engines.local_rendering import LocalRenderer
from polar_proxy.types import ChatRequest, Message

BILLED = Message("system", "x-anthropic-billing-header: cc_version=2; cch=1;\nYou are terse.")
HELLO = ChatRequest("m", (Message("system", "You are terse."), Message("user", "Hello.")))
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Server:
    """A server with the bundled policy's template, which it may change. It counts its renderings."""

    def __init__(self, form: MessageForm) -> None:
        self.form = form
        self.renderings = 0
        self.adds = ""
        files = ModelFiles.load(POLAR_TINY)
        assert files is not None
        self.files = files

    async def render(self, request: ChatRequest, *, generation: bool = True) -> list[int]:
        self.renderings += 1
        return self.files.encode(self.files.template.render(request, self.form, generation=generation) + self.adds)

    async def find(self) -> LocalRenderer[list[int]]:
        renderer = await LocalRenderer.find(self.files.template, self.render, self.files.encode)
        assert renderer is not None
        return renderer


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("tools", get_args(ToolForm))
async def test_texts_have_the_servers_ids(drops: bool, tools: ToolForm) -> None:
    server = Server(MessageForm(tools=tools, drops_billing_line=drops))
    renderer = await server.find()
    for system in (BILLED, replace(BILLED, content=[{"type": "text", "text": BILLED.content}])):
        request = ChatRequest("m", (system, Message("user", "Hello.")), tools=(LOOK,))
        assert await renderer.matches_server([request])
        (text,) = await renderer.texts([request])
        assert ("billing" not in text) == drops
        assert await renderer.encode(text) == await server.render(request)


async def test_is_not_found_if_the_server_renders_otherwise() -> None:
    server = Server(MessageForm())
    server.adds = "!"
    assert await LocalRenderer.find(server.files.template, server.render, server.files.encode) is None


async def test_a_conversation_that_differs_is_not_rendered_here() -> None:
    server = Server(MessageForm())
    renderer = await server.find()
    server.adds = "!"
    assert not await renderer.matches_server([HELLO])
    assert not await renderer.confirm(HELLO)


async def test_conversations_are_compared_once_for_their_tools_and_then_now_and_again() -> None:
    server = Server(MessageForm())
    renderer = await server.find()
    before = server.renderings
    for request in (HELLO, HELLO, replace(HELLO, tools=(LOOK,))):
        assert await renderer.matches_server([request])
    assert server.renderings == before + 2
    server.adds = "!"
    confirmed = [await renderer.confirm(HELLO) for _ in range(32)]
    assert confirmed == [True] * 31 + [False]
    assert not await renderer.matches_server([HELLO])
    assert await renderer.matches_server([replace(HELLO, tools=(LOOK,))])


async def test_roles_that_servers_move_are_rendered_by_the_server() -> None:
    server = Server(MessageForm())
    renderer = await server.find()
    developer = replace(HELLO, messages=(*HELLO.messages, Message("developer", "Mind this.")))
    assert not await renderer.matches_server([developer])
