"""vLLM's own answer parsers in a side process, which runs `parser_worker.py` in vLLM's environment.

It parses answers as the server's chat route does, without a request to the server, in 0.02 to 0.3 ms for each token.

* Each engine has one process. It is started when the engine is entered, and needs about 550 MB of memory.
* Requests are answered in order. If a reply takes longer than `REPLY_SECONDS`, the process is killed.
* If the process ends, all answers that it was parsing fail with EngineError, and the next answer starts a new process.
  Polar never falls back to another parser.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import orjson

from polar_proxy.config import child_environment
from polar_proxy.errors import EngineError, RequestError
from polar_proxy.types import Json

START_SECONDS = 180.0
REPLY_SECONDS = 60.0
_EXIT_SECONDS = 2.0
_MAX_ANSWERS = 4096
_MAX_LINE = 1 << 26
"""Maximum size of one reply (a line) in bytes."""
_WORKER = Path(__file__).with_name("parser_worker.py")
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

Parsers = tuple[str | None, str | None]
"""The names of a tool parser and a reasoning parser, as given to `vllm serve`."""


class RenderedChat(NamedTuple):
    """A rendered conversation: its token ids, and their text with special tokens."""

    ids: list[int]
    text: str


class ParserProcess:
    """A process that runs vLLM's answer parsers. It is started by `async with`, or else by the first request.

    `python`: the Python of vLLM's environment. `model`: a folder, or a name in the Hugging Face cache.
    """

    def __init__(self, python: str, model: str) -> None:
        self._python = python
        self._model = model
        self._process: asyncio.subprocess.Process | None = None
        self._replies: deque[asyncio.Future[Json]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._log: deque[str] = deque(maxlen=20)
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._open = 0
        self.starts = 0
        """Number of times that the process was started. An answer that began before the last start fails."""
        self.version = ""
        """vLLM's version."""
        self.stop_ids: list[int] = []
        """The stop tokens of the tokenizer and of the model's generation config."""
        self.reasoning_tags: list[tuple[str, str]] = []
        """Pairs of texts that begin and end reasoning, from all reasoning parsers that work with the model."""

    async def __aenter__(self) -> Self:
        await self.ensure_started()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self._fail("was stopped")
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if process is not None:
            await process.wait()

    async def match(
        self, request: Json, samples: Sequence[Json], parsers: Sequence[Parsers] | None = None
    ) -> list[Parsers]:
        """Return the pairs of parsers that parse each sample answer into the result that the sample names.

        The pairs in `parsers` are tried in this order. If `parsers` is None, every pair that vLLM has is tried: first
        the pairs without a reasoning parser, then the others. In each of the two groups, the pairs are ordered by how
        much the two names resemble the model type and each other.
        """
        await self.ensure_started()
        line = {"op": "match", "request": request, "samples": list(samples), "parsers": parsers}
        return [(tool, reasoning) for tool, reasoning in (await self._ask(line, START_SECONDS))["parsers"]]

    async def distinguish(
        self, request: Json, prompts: Sequence[Sequence[int]], answers: Json, parsers: Sequence[Parsers], seed: int
    ) -> list[tuple[int, list[int]]]:
        """Return random answers that at least two entries of `parsers` parse differently; empty if none was found.

        `answers`: lists of ids under the keys `start`, `bodies` and `stop`. To try an answer, one body is changed at
        random and put between `start` and `stop`. Each answer is returned as (index in `prompts`, changed body).
        """
        await self.ensure_started()
        line = {"op": "distinguish", "request": request, "prompts": prompts, "answers": answers, "seed": seed}
        reply = await self._ask(line | {"parsers": parsers}, START_SECONDS)
        return [(number, list(body)) for number, body in reply["answers"]]

    async def render(self, bodies: Sequence[Json]) -> list[RenderedChat]:
        """Render conversations as the chat route does. Raises RequestError for a conversation that vLLM refuses.

        `bodies`: the bodies of chat requests; `add_generation_prompt: false` leaves out the tokens that open the
        answer.
        """
        await self.ensure_started()
        reply = await self._ask({"op": "render", "requests": list(bodies)}, START_SECONDS)
        if "refused" in reply:
            raise RequestError(f"vLLM refuses this conversation: {reply['refused']}", param="messages")
        return [RenderedChat(ids, text) for ids, text in reply["renderings"]]

    async def open(self, parsers: Parsers, request: Json, prompt: Sequence[int]) -> ParsedStream:
        """Begin to parse the answer to a request. Raises EngineError if vLLM refuses the request."""
        await self.ensure_started()
        if self._open >= _MAX_ANSWERS:
            raise EngineError(
                f"The process with vLLM's parsers already parses {_MAX_ANSWERS} answers, which is its limit: try again "
                "later."
            )
        stream = ParsedStream(self, next(self._numbers), self.starts)
        self._open += 1
        try:
            line = {"op": "open", "answer": stream.number, "parsers": parsers, "request": request, "prompt": prompt}
            stream.sampling = await self._ask(line)
        except BaseException:
            self.close(stream)
            raise
        return stream

    async def feed(self, stream: ParsedStream, index: int, token_ids: Sequence[int], finish: str | None) -> Json:
        if stream.start != self.starts or self._process is None:
            raise EngineError(f"The process with vLLM's parsers ended while it read this answer.{self._tail()}")
        line = {"op": "feed", "answer": stream.number, "index": index, "ids": list(token_ids), "finish": finish}
        return await self._ask(line)

    def close(self, stream: ParsedStream) -> None:
        """Make the process release an answer, without waiting for its reply. A cancelled task may call this."""
        if stream.start == self.starts and self._process is not None:
            self._open -= 1
            self._send({"op": "close", "answer": stream.number})

    # The process

    async def ensure_started(self) -> None:
        async with self._starting:
            if self._process is None:
                await self._start()

    async def _start(self) -> None:
        self._log.clear()
        self._open = 0
        try:
            process = await asyncio.create_subprocess_exec(
                *(self._python, str(_WORKER), self._model),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=child_environment(_ENVIRONMENT),
                limit=_MAX_LINE,
            )
        except OSError as error:
            raise EngineError(f"vLLM's parsers cannot be started with {self._python}: {error}.") from error
        self._process = process
        self.starts += 1
        self._tasks = [asyncio.create_task(self._read_log(process)), asyncio.create_task(self._read_replies(process))]
        greeting: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._replies.append(greeting)
        greeted = await self._wait(greeting, START_SECONDS)
        self.version = str(greeted["version"])
        self.stop_ids = list(greeted["stop_ids"])
        self.reasoning_tags = [(start, end) for start, end in greeted["reasoning_tags"]]

    async def _ask(self, line: Json, seconds: float | None = None) -> Json:
        reply = await self._wait(self._send(line), seconds or REPLY_SECONDS)
        if "error" in reply:
            raise EngineError(f"vLLM's parser failed: {reply['error']}")
        return reply

    def _send(self, line: Json) -> asyncio.Future[Json]:
        if self._process is None or self._process.stdin is None:
            raise EngineError(f"The process with vLLM's parsers has ended.{self._tail()}")
        future: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._replies.append(future)
        self._process.stdin.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        return future

    async def _wait(self, reply: asyncio.Future[Json], seconds: float) -> Json:
        try:
            async with asyncio.timeout(seconds):
                return await reply
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"The process with vLLM's parsers did not reply within {seconds:.0f} s.") from error

    async def _read_replies(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                future = self._replies.popleft()
                if not future.done():
                    future.set_result(orjson.loads(line))
            async with asyncio.timeout(_EXIT_SECONDS):  # `kill` loses the status of a process that is ending
                await process.wait()
        except (ValueError, TimeoutError):  # a line above the limit, or only its output has ended
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        status = await process.wait()
        await self._tasks[0]
        self._process = None
        self._fail(f"ended with status {status}")

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while line := await process.stderr.readline():
            self._log.append(line.decode(errors="replace").rstrip())

    def _fail(self, reason: str) -> None:
        error = EngineError(f"The process with vLLM's parsers {reason}.{self._tail()}")
        while self._replies:
            future = self._replies.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody waits for the reply to `close`

    def _tail(self) -> str:
        return f" Its last line: {self._log[-1]}" if self._log else ""


class ParsedStream:
    """An answer that a `ParserProcess` parses while its tokens arrive."""

    def __init__(self, process: ParserProcess, number: int, start: int) -> None:
        self.number = number
        self.start = start
        self.sampling: Json = {}
        """How vLLM's chat route would sample the request: whether special tokens are part of the text (`special`), and
        the structured output (`constraint`). See `parser_worker.py`."""
        self._process = process

    async def feed(self, index: int, token_ids: Sequence[int], finish: str | None) -> Json:
        return await self._process.feed(self, index, token_ids, finish)

    def close(self) -> None:
        self._process.close(self)


def read_parsers(text: str | None) -> Parsers | None:
    """Return the parsers that the text `TOOL/REASONING` names. Either name may be empty, which means no such parser."""
    if text is None:
        return None
    tool, _, reasoning = text.partition("/")
    return tool or None, reasoning or None


def find_vllm_python(given: str | None) -> str | None:
    """Return the path of the Python of an environment with vLLM; None if none is found.

    These are tried in order: `given`, the Python of the `vllm` command, and this process's own if it can import vLLM.
    """
    if given:
        return given
    command = shutil.which("vllm")
    if command is not None:
        first = Path(command).read_bytes()[:200].split(b"\n", 1)[0].decode(errors="replace")
        if (found := re.match(r"#!\s*(\S*python\S*)$", first)) and Path(found[1]).exists():
            return found[1]
    return sys.executable if any(Path(folder, "vllm", "__init__.py").exists() for folder in sys.path) else None
