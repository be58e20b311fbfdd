"""A session on a llama-server is continued from its exact tokens and passes an audit."""

from __future__ import annotations

import pytest

from polar_proxy.engines.llamacpp import LlamaCppEngine
from polar_proxy.store import Store
from polar_proxy.traces.audit import AuditReference, audit
from polar_proxy.traces.builders import build
from polar_proxy.traces.scoring import Scorer
from polar_proxy.types import PromptMode
from tests.conftest import Serve
from tests.fakes.llama_server import FakeLlama
from tests.gateway.agents import client, recorded_calls
from tests.gateway.test_continuation import SAMPLED, TOOL, Conversation, prompt_and_answer, results, user

pytestmark = pytest.mark.slow

CALL = f'I look, é.\n<tool_call>\n{{"name": "look", "arguments": {SAMPLED}}}\n</tool_call>'


@pytest.mark.parametrize("mode", ["continue", "render"])
async def test_a_session_is_continued_and_audited(serve: Serve, store: Store, mode: PromptMode) -> None:
    async with FakeLlama() as fake:
        async with serve(LlamaCppEngine(fake.url), prompt_mode=mode) as gateway, client(gateway.url) as http:
            fake.script(CALL, "Done with 漢字.", "Nothing more.")
            conversation = Conversation(http, tools=[TOOL], temperature=0.7)
            choice = await conversation.say(user("look"))
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": SAMPLED}
            conversation.echo(choice["message"])
            choice = await conversation.say(*results(choice["message"]))
            assert choice["message"]["content"] == "Done with 漢字."
            conversation.echo(choice["message"], content=choice["message"]["content"] + "\n")
            await conversation.say(user("and now?"))
        calls = await recorded_calls(store, count=3)
        traces = build(calls).traces
        async with LlamaCppEngine(fake.url) as engine:
            audits = await audit(Scorer(engine), AuditReference(engine.info, None), traces, calls)
    if mode == "render":
        assert len(traces) == 3  # the arguments and the white space of the history changed
    else:
        assert [call.prompt_reason for call in calls] == ["no_base", None, None]
        (trace,) = traces
        assert trace.token_ids.tolist() == prompt_and_answer(calls[-1])
    assert [one.findings for one in audits] == [{}] * len(traces)
    assert {one.grade for one in audits} == {"exact" if mode == "render" else "continued"}
