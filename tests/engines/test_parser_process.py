"""vLLM's parsers in a side process: crashes, limits, and the real ones from vLLM's environment."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from polar_proxy.engines.vllm import parser_process
from polar_proxy.engines.vllm.answer_parser import ProcessAnswerParser, parser_request
from polar_proxy.engines.vllm.parser_process import ParserProcess, RenderedChat, find_vllm_python, read_parsers
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import Message, SampleEvent, ToolCall
from tests.engines.engine_contract import WEATHER, chat

pytestmark = pytest.mark.slow

# In place of the Python with vLLM: the same protocol, one letter of text for each token; token 9 ends it, 8 hangs it.
WORKER = """#!/usr/bin/env python3
import json, sys
print(json.dumps({"version": "0", "stop_ids": [9], "reasoning_tags": []}), flush=True)
for line in sys.stdin:
    line = json.loads(line)
    reply = {}
    if line["op"] == "open":
        reply = {"special": False, "constraint": {"choice": ["a"]} if line["request"].get("tools") else None}
    if line["op"] == "open" and line["parsers"][0] == "unknown":
        reply = {"error": "KeyError: unknown"}
    if line["op"] == "render":
        bodies = line["requests"]
        reply = {"renderings": [[[len(body["messages"])], "x"] for body in bodies]}
        if not all(body["messages"] for body in bodies):
            reply = {"refused": "no messages"}
    if line["op"] == "feed":
        if 9 in line["ids"]:
            print("token nine", file=sys.stderr)
            sys.exit(3)
        while 8 in line["ids"]:
            pass
        reply = {"text": "x" * len(line["ids"]), "reasoning": "", "calls": [], "finish": line["finish"]}
    print(json.dumps(reply), flush=True)
"""


@pytest_asyncio.fixture
async def process(tmp_path: Path) -> AsyncIterator[ParserProcess]:
    python = tmp_path / "python"
    python.write_text(WORKER)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    async with ParserProcess(str(python), "model") as started:
        yield started


async def test_a_crash_fails_the_answers_it_read_and_no_others(process: ParserProcess) -> None:
    one, other = await process.open((None, None), {}, [1]), await process.open((None, None), {}, [1])
    assert (await one.feed(0, [1, 2], None))["text"] == "xx"
    with pytest.raises(EngineError, match=r"ended with status 3\. Its last line: token nine"):
        await one.feed(0, [9], None)
    with pytest.raises(EngineError, match="ended while it read this answer"):
        await other.feed(0, [1], None)
    one.close()
    other.close()
    restarted = await process.open((None, None), {}, [1])
    assert (await restarted.feed(0, [1], "stop"))["finish"] == "stop"
    assert process.starts == 2


async def test_a_parser_that_hangs_ends_the_process(process: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = await process.open((None, None), {}, [1])
    monkeypatch.setattr(parser_process, "REPLY_SECONDS", 0.3)
    with pytest.raises(EngineError, match="did not reply"):
        await stream.feed(0, [8], None)
    monkeypatch.setattr(parser_process, "REPLY_SECONDS", 30.0)
    assert (await (await process.open((None, None), {}, [1])).feed(0, [1], None))["text"] == "x"


async def test_an_error_of_a_parser_is_reported_and_the_process_stays(process: ParserProcess) -> None:
    with pytest.raises(EngineError, match="vLLM's parser failed: KeyError: unknown"):
        await process.open(("unknown", None), {}, [1])
    await process.open((None, None), {}, [1])
    assert process.starts == 1


async def test_conversations_are_rendered_or_refused(process: ParserProcess) -> None:
    assert await process.render([{"messages": [1, 2]}, {"messages": [1]}]) == [
        RenderedChat([2], "x"),
        RenderedChat([1], "x"),
    ]
    with pytest.raises(RequestError, match="refuses this conversation: no messages"):
        await process.render([{"messages": [1]}, {"messages": []}])


async def test_the_number_of_open_answers_is_limited(process: ParserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_process, "_MAX_ANSWERS", 2)
    streams = [await process.open((None, None), {}, [1]) for _ in range(2)]
    with pytest.raises(EngineError, match="already parses 2 answers"):
        await process.open((None, None), {}, [1])
    streams[0].close()
    await process.open((None, None), {}, [1])


async def test_a_cancelled_request_does_not_shift_the_replies(process: ParserProcess) -> None:
    stream = await process.open((None, None), {}, [1])
    task = asyncio.create_task(stream.feed(0, [1], None))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await stream.feed(0, [1, 1, 1], None))["text"] == "xxx"


async def test_answers_are_sampled_under_the_grammar_of_the_chat_route(process: ParserProcess) -> None:
    request = parser_request("m", chat(tools=(WEATHER,)))
    parser = ProcessAnswerParser(process, (None, None), request, np.array([1], dtype=np.int32))
    body = await parser.open({"prompt": [1]})
    assert body == {"prompt": [1], "skip_special_tokens": True, "structured_outputs": {"choice": ["a"]}}
    assert parser.constrained
    assert (await parser.parse(SampleEvent(text="raw", token_ids=(1,)))).text == "x"
    parser.close()
    parser.close()


async def test_a_python_without_vllm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be started"):
        await ParserProcess(str(tmp_path / "none"), "model").open((None, None), {}, [1])


def test_finds_the_python_of_the_vllm_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python3"
    python.touch()
    command = tmp_path / "vllm"
    command.write_text(f"#!{python}\nimport vllm\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_vllm_python(None) == str(python)
    assert find_vllm_python("/other/python") == "/other/python"


@pytest.mark.parametrize(
    ("text", "parsers"),
    [(None, None), ("glm47/glm47", ("glm47", "glm47")), ("hermes", ("hermes", None)), ("/r", (None, "r"))],
)
def test_reads_the_names_of_the_parsers(text: str | None, parsers: object) -> None:
    assert read_parsers(text) == parsers


def test_a_request_for_parsing_keeps_the_number_of_earlier_calls() -> None:
    """Kimi's parser numbers the calls of a conversation."""
    call = ToolCall("functions.look:0", "look", "{}")
    request = chat(tools=(WEATHER,))
    long = Message("user", "x" * 1000), Message("assistant", "", tool_calls=(call, call)), Message("user", "y")
    body = parser_request("m", type(request)("m", long, tools=request.tools))
    assert sum(len(message.get("tool_calls", ())) for message in body["messages"]) == 2
    assert len(json.dumps(body["messages"])) < 400
