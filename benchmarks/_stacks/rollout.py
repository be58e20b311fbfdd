"""Generated model calls of a coding agent with real text, to measure the stores of Polar and its peer.

The text is source code, search results, listings and docstrings of Python's standard library, about as repetitive as an
agent's work. Tokens come from polar-tiny's tokenizer. Log-probabilities are a float32 log-softmax of random logits,
mostly near zero like those of a trained policy. The same seed gives the same calls.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from polar_proxy.engines.factory import POLAR_TINY
from polar_proxy.sessions.state import SessionState
from polar_proxy.types import CallRecord, ChatRequest, Choice, EngineInfo, Json, Logprobs, Message, TokenIds, ToolCall

MODULES = (
    *("argparse", "ast", "asyncio/base_events", "base64", "bisect", "calendar", "collections/__init__", "configparser"),
    *("contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest", "email/message"),
    *("enum", "fractions", "ftplib", "functools", "gettext", "glob", "gzip", "heapq", "html/parser", "http/client"),
    *("http/cookies", "imaplib", "inspect", "ipaddress", "json/decoder", "linecache", "locale", "logging/__init__"),
    *("mailbox", "optparse", "os", "pathlib", "pdb", "pickle", "platform", "plistlib", "pprint", "queue", "random"),
    *(
        "sched",
        "selectors",
        "shelve",
        "shlex",
        "shutil",
        "smtplib",
        "socketserver",
        "sqlite3/dump",
        "ssl",
        "statistics",
    ),
    *("string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "typing"),
    *("unittest/case", "urllib/parse", "uuid", "warnings", "weakref", "xml/dom/minidom", "zipfile"),
)
END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class CallData:
    """One call: the conversation that is sent (OpenAI format), the answer, and the exact tokens of both."""

    messages: tuple[Json, ...]
    answer: Json
    prompt_ids: TokenIds
    token_ids: TokenIds
    logprobs: Logprobs
    started_at: float


def tools() -> list[Json]:
    text: Json = {"type": "string"}
    made = []
    for name, about, fields in (
        ("bash", "Run a command in the repository and return what it prints. The shell keeps its folder.", ["command"]),
        ("edit", "Replace a piece of a file. The old text must occur once, exactly.", ["path", "old", "new"]),
        ("finish", "End the work with a summary of what was changed and how it was tested.", ["summary"]),
    ):
        schema = {"type": "object", "properties": dict.fromkeys(fields, text), "required": fields}
        made.append({"type": "function", "function": {"name": name, "description": about, "parameters": schema}})
    return made


def conversation(turns: int, tokens: int, seed: int = 1) -> list[CallData]:
    """Return `turns` calls that extend each other. The last prompt and answer together have about `tokens` tokens, give
    or take one observation."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    system = f"You fix bugs in the Python library `lib{seed}`.\n\n" + "\n".join(_docstrings(rng, 12))
    messages: list[Json] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Fix this, then run the tests.\n\n" + "\n".join(_docstrings(rng, 3))},
    ]
    head = f"<|im_start|>system\n{system}\n\n# Tools\n" + "\n".join(json.dumps(tool) for tool in tools()) + END + "\n"
    ids = [*_encode(head), *_encode(_turn("user", str(messages[1]["content"])))]
    generation = _encode("<|im_start|>assistant\n")
    made: list[CallData] = []
    clock = 1_750_000_000.0
    for number in range(turns):
        thought, name, arguments, observation = _step(rng)
        call_id = f"call_{rng.getrandbits(96):024x}"
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        answer: Json = {"role": "assistant", "content": thought, "tool_calls": [call]}
        text = f'{thought}\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>{END}'
        sampled = _encode(text)
        logprobs = _logprobs(noise, len(sampled))
        prompt = np.array([*ids, *generation], dtype=np.int32)
        clock += rng.uniform(2, 20)
        made.append(
            CallData(tuple(messages), answer, prompt, np.array(sampled, dtype=np.int32), logprobs, round(clock, 6))
        )
        budget = (tokens - len(ids)) // (turns - number)  # tokens that each of the remaining turns may add
        shown = _encode(observation)[: max(16, budget - len(sampled) - 16)]
        observation = _tokenizer().decode(shown)
        messages = [*messages, answer, {"role": "tool", "tool_call_id": call_id, "content": observation}]
        ids += [
            *generation,
            *sampled,
            *_encode("\n" + _turn("user", f"<tool_response>\n{observation}\n</tool_response>")),
        ]
    return made


def records(session_id: str, turns: list[CallData], *, step: float = 0.0) -> Iterator[CallRecord]:
    """Yield the calls as the gateway records them, with the fingerprint of the history. `step` is added to times."""
    session = SessionState(session_id, {})
    tool_list = tools()
    tools_json = orjson.dumps(tool_list)
    for turn in turns:
        started = turn.started_at + step
        call_id = _call_id(session_id, started)
        request = ChatRequest(model="polar-tiny", messages=tuple(map(_message, turn.messages)), tools=tuple(tool_list))
        place = session.place(call_id, request, now=started)
        fingerprint = session.record_answer(place, [_message(turn.answer)], "ok", now=started + 1)
        yield CallRecord(
            call_id=call_id,
            session_id=session_id,
            dialect="openai_chat",
            path="/v1/chat/completions",
            stream=True,
            model="polar-tiny",
            engine=INFO,
            weight_version="0",
            logprob_mode="processed",
            status="ok",
            http_status=200,
            error=None,
            edge=place.edge,
            parent_call_id=place.parent_call_id,
            messages=tuple(json.dumps(message).encode() for message in turn.messages),
            tools=tools_json,
            params={"model": "polar-tiny", "stream": True, "temperature": 1.0, "max_tokens": 8192},
            sampling={"temperature": 1.0, "max_tokens": 8192, "logprobs": True},
            prompt_ids=turn.prompt_ids,
            choices=(Choice(0, _message(turn.answer), "tool_calls", turn.token_ids, turn.logprobs),),
            started_at=started,
            first_token_at=started + 0.213874,
            ended_at=started + 1.734651,
            cached_tokens=0,
            rule=place.rule,
            ambiguous=place.ambiguous,
            thread=place.thread,
            fingerprint=fingerprint,
        )


INFO = EngineInfo(
    engine="local",
    version="4.57",
    model="polar-tiny",
    context_length=131_072,
    template_hash="0" * 32,
    logprob_mode="processed",
    capabilities=frozenset({"token_ids", "logprobs", "tools", "token_prompt"}),
    eos_token_ids=(1,),
)


def _step(rng: random.Random) -> tuple[str, str, dict[str, str], str]:
    """Return a thought, a tool with its arguments, and the tool's answer."""
    module = rng.choice(MODULES)
    lines = _source(module)
    start = rng.randrange(max(1, len(lines) - 160))
    thought = " ".join(_docstrings(rng, 2))[:400]
    kind = rng.randrange(5)
    if kind < 2:
        command = f"sed -n '{start + 1},{start + 160}p' {module}.py"
        return thought, "bash", {"command": command}, "\n".join(lines[start : start + 160])
    if kind == 2:
        word = rng.choice(["self._", "raise ", "return ", "import ", "isinstance", "None", "lambda", "except"])
        found = [
            f"{name}.py:{at}:{line}"
            for name in rng.sample(MODULES, 6)
            for at, line in enumerate(_source(name), 1)
            if word in line
        ]
        return thought, "bash", {"command": f"grep -rn {word!r} . | head -150"}, "\n".join(found[:150])
    if kind == 3:
        old = lines[start : start + rng.randrange(3, 9)]
        new = [line.replace("self", "this", 1) for line in old] + _source(rng.choice(MODULES))[40:43]
        arguments = {"path": f"{module}.py", "old": "\n".join(old), "new": "\n".join(new)}
        shown = "\n".join(f"{at:6}\t{line}" for at, line in enumerate(lines[start : start + 120], start + 1))
        return thought, "edit", arguments, f"The file {module}.py was changed:\n{shown}"
    output = [f"test_{line.split('(')[0].split()[-1]} ({module}.Test) ... ok" for line in lines if "def " in line][:60]
    trace = [
        f'  File "{module}.py", line {start + at}, in run\n    {line.strip()}'
        for at, line in enumerate(lines[start : start + 40])
        if line.strip()
    ]
    return (
        thought,
        "bash",
        {"command": f"python -m pytest -x -q tests/test_{module.split('/')[0]}.py"},
        "\n".join(
            [*output, "Traceback (most recent call last):", *trace, f"AssertionError: {rng.random()} != {rng.random()}"]
        ),
    )


def _logprobs(noise: np.random.Generator, count: int) -> Logprobs:
    """Return float32 [count]: log-probabilities of samples from mostly peaked distributions (mean about -0.3)."""
    logits = noise.normal(0.0, 2.0, (count, 256))
    logits[:, 0] += noise.gamma(3.0, 5.0, count) + 4.0
    picked = np.argmax(logits + noise.gumbel(size=logits.shape), axis=1)
    single = logits.astype(np.float32)
    single -= single.max(axis=1, keepdims=True)
    logs = single - np.log(np.exp(single).sum(axis=1, keepdims=True, dtype=np.float32))
    found: Logprobs = logs[np.arange(count), picked]
    return found


@cache
def _source(module: str) -> list[str]:
    return (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text().splitlines()


@cache
def _documents(module: str) -> list[str]:
    """Return the first paragraphs of the module's docstrings."""
    tree = ast.parse("\n".join(_source(module)))
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [" ".join(text.split("\n\n")[0].split()) for text in found if text] or ["No documentation."]


def _docstrings(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(_documents(rng.choice(MODULES))) for _ in range(count)]


@cache
def _tokenizer() -> Any:
    return Tokenizer.from_file(str(POLAR_TINY / "tokenizer.json"))


def _encode(text: str) -> list[int]:
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}{END}\n"


def _message(message: Json) -> Message:
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return Message(message["role"], message["content"], tool_calls=calls, tool_call_id=message.get("tool_call_id"))


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def _call_id(session_id: str, at: float) -> str:
    """Return an id like those of `types.new_id`, but derived from session and time only."""
    rng = random.Random(f"{session_id}{at}")
    return f"call_{int(at * 1e6):013x}"[:17] + "".join(rng.choice(_ALPHABET) for _ in range(8))
