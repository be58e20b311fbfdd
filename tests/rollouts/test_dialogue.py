"""Dialogues: the order and the end of the turns, and whole rollouts with an agent that speaks ACP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from harness_adapters.base import get_adapter
from polar_proxy.config import EngineSettings, RouteSettings, Settings
from polar_proxy.conformance.profiles import profile_of
from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine
from polar_proxy.errors import BadTaskError, EngineError
from polar_proxy.rewards import CommandEvaluator
from polar_proxy.rollouts import JobSpec, RolloutService, local_gateway
from polar_proxy.rollouts.dialogue import DONE, AgentRun, DialogueMessage, PlayedUser, ScriptedUser, play_dialogue
from polar_proxy.store import RolloutRow, Store
from polar_proxy.tasks import DialogueUser, Task, check_task, tasks_from_rows
from polar_proxy.traces.operations import find_targets
from polar_proxy.types import ChatRequest, EngineRequest
from sandboxes.base import ExecResult
from tests.conftest import Serve
from tests.fakes.acp_definition import write_definition
from tests.harness_adapters import real_runs
from tests.rollouts.quick_limits import QUICK_LIMITS


class ScriptedAgent:
    """Keeps the texts that it is started on; each start takes `seconds` and exits with a code of `codes`."""

    def __init__(self, codes: Sequence[int] = (), seconds: float = 1.0) -> None:
        self.starts: list[tuple[str, bool, float]] = []
        self._codes = iter(codes)
        self._seconds = seconds

    async def exec(self, text: str, resume: bool, seconds: float) -> ExecResult:
        self.starts.append((text, resume, seconds))
        code = next(self._codes, 0)
        return ExecResult(code, f"did {text};".encode(), b"", False, self._seconds)

    async def play(self, texts: Sequence[str], max_turns: int = 9, seconds: float = 100.0) -> AgentRun:
        async def last_answer() -> str:
            return f"answer {len(self.starts)}"

        return await play_dialogue(
            "task", ScriptedUser(texts), self.exec, last_answer, lambda run: run.exit_code == 0,
            max_turns=max_turns, seconds=seconds,
        )  # fmt: skip


async def test_each_text_of_the_user_is_one_turn() -> None:
    agent = ScriptedAgent()
    run = await agent.play(["more", "thanks"])
    assert agent.starts == [("task", False, 100), ("more", True, 99), ("thanks", True, 98)]
    assert run.output == b"did task;did more;did thanks;"
    assert [(one.speaker, one.text) for one in run.messages] == [
        ("user", "task"), ("agent", "answer 1"), ("user", "more"), ("agent", "answer 2"), ("user", "thanks"),
        ("agent", "answer 3"),
    ]  # fmt: skip
    assert run.end == "the user is done"


async def test_ends_at_the_limit_of_turns() -> None:
    agent = ScriptedAgent()
    run = await agent.play(["a", "b", "c"], max_turns=2)
    assert [text for text, *_ in agent.starts] == ["task", "a"]
    assert run.end == "the limit of 2 turns"
    assert run.messages[-1] == DialogueMessage("agent", "answer 2")


async def test_ends_with_a_turn_that_fails() -> None:
    agent = ScriptedAgent(codes=(0, 3))
    run = await agent.play(["a", "b"])
    assert (len(agent.starts), run.last.exit_code, run.end) == (2, 3, "the agent's turn failed")


async def test_the_time_limit_holds_for_all_turns_together() -> None:
    agent = ScriptedAgent(seconds=60)
    await agent.play(["a", "b"])
    assert [seconds for *_, seconds in agent.starts] == [100, 40, 0.1]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({}, "give either texts or a persona"),
        ({"texts": ["a"], "persona": "p"}, "give either texts or a persona"),
        ({"texts": ["a", " "]}, "a text is empty"),
        ({"persona": ""}, "a text is empty"),
        ({"answers": ["a"]}, "user.answers: there is no such field"),
    ],
)
def test_rejects_a_wrong_user(user: dict[str, Any], message: str) -> None:
    row = {"task_id": "t", "instruction": "i", "user": user, "evaluator": {"kind": "command", "argv": ["true"]}}
    _, (refused,) = tasks_from_rows("jsonl", [row])
    assert message in refused.reason


def dialogue_task(user: DialogueUser) -> Task:
    check = CommandEvaluator(argv=("grep", "-q", "and now green -> ok 2", "notes.txt"))
    task = Task("talk", "jsonl", 0, "paint it red", {"a.txt": "x\n"}, evaluators=(check,), user=user)
    check_task(task)
    return task


def agent_model(request: EngineRequest) -> ScriptedAnswer:
    assert isinstance(request, ChatRequest)
    return f"ok {sum(message.role == 'user' for message in request.messages)}"


async def run_dialogue(
    store: Store, tmp_path: Path, user: DialogueUser, script: Callable[[EngineRequest], ScriptedAnswer] = agent_model,
    **given: Any,
) -> RolloutRow:  # fmt: skip
    """Run one rollout of a dialogue with the small ACP agent, in a process sandbox, and return its row."""
    harnesses = given.pop("harnesses", None)
    if harnesses is None:
        harnesses = tmp_path / "harnesses"
        write_definition(harnesses)
    engine = ScriptedEngine(script)
    settings = given.pop("settings", None) or Settings()
    async with (
        engine,
        local_gateway(settings, engine, store) as gateway,
        RolloutService(store, gateway, engine, harnesses, limits=QUICK_LIMITS) as service,
    ):
        spec = JobSpec(**{"harness": "small-acp", "sandbox": "process", "timeout": 60.0, **given})
        job, _ = await service.submit([dialogue_task(user)], spec)
        async with asyncio.timeout(120):
            await service.until_done(job.job_id)
    (row,) = await store.rollouts.find()
    return row


async def read_dialogue(store: Store, row: RolloutRow) -> tuple[str, list[str]]:
    """Return why the recorded dialogue ended, and its texts."""
    (stored,) = [one for one in await store.artifacts.of_rollout(row.rollout_id) if one.name == "dialogue.json"]
    dialogue = orjson.loads(stored.path.read_bytes())
    return dialogue["end"], [one["text"] for one in dialogue["messages"]]


@pytest.mark.slow
@pytest.mark.usefixtures("own_sandbox_register")
async def test_a_scripted_user_talks_to_an_agent(store: Store, tmp_path: Path) -> None:
    row = await run_dialogue(store, tmp_path, DialogueUser(("and now green",)))
    assert (row.status, row.reward, row.error) == ("done", 1.0, None)
    assert row.session_id is not None
    calls = await store.calls.of_session(row.session_id)
    assert [call.edge for call in calls] == ["root", "continues"]
    (trace,) = await store.traces.find(session_id=row.session_id)
    assert sum(trace.loss_mask) == sum(len(call.choices[0].token_ids) for call in calls)
    assert await read_dialogue(store, row) == ("the user is done", ["paint it red", "ok 1", "and now green", "ok 2"])


@pytest.mark.slow
@pytest.mark.usefixtures("own_sandbox_register")
async def test_a_recorded_dialogue_has_no_secrets(store: Store, tmp_path: Path) -> None:
    key = "sk-ant-api03-0123456789abcdef0123"
    row = await run_dialogue(store, tmp_path, DialogueUser((f"My key is {key}.",)), lambda request: f"I use {key}.")
    (stored,) = [one for one in await store.artifacts.of_rollout(row.rollout_id) if one.name == "dialogue.json"]
    assert key.encode() not in stored.path.read_bytes()
    removed = "[secret removed]"
    texts = ["paint it red", f"I use {removed}.", f"My key is {removed}.", f"I use {removed}."]
    assert (await read_dialogue(store, row))[1] == texts


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["codex", "acp:opencode"])
async def test_a_scripted_user_talks_to_a_real_agent(
    name: str, store: Store, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One agent resumes its conversation from the command line, and one is kept alive by ACP."""
    adapter = get_adapter(name)
    installed = real_runs.install(adapter, tmp_path_factory)
    profile = profile_of(adapter)
    text = json.dumps(dict(profile.arguments)).replace("{command}", "echo 'and now green -> ok 2' > notes.txt")
    play = real_runs.play("Which colour?", real_runs.call(profile.tool, text), "Painted.")

    def script(request: EngineRequest) -> ScriptedAnswer:
        assert isinstance(request, ChatRequest)
        return play(request) if f'"{profile.tool}"' in json.dumps(list(request.tools or ())) else "A title"

    given = {"harness": name, "harnesses": installed.root.parent.parent, "timeout": 400.0}
    row = await run_dialogue(store, tmp_path, DialogueUser(("and now green",)), script, **given)
    assert (row.status, row.reward, row.error) == ("done", 1.0, None)
    assert row.session_id is not None
    calls = await store.calls.of_session(row.session_id)
    assert [call.edge for call in calls if call.edge != "side_call"] == ["root", "continues", "continues"]
    _, texts = await read_dialogue(store, row)
    assert texts == ["paint it red", "Which colour?", "and now green", "Painted."]


@pytest.mark.slow
@pytest.mark.usefixtures("own_sandbox_register")
@pytest.mark.parametrize("own_engine", [False, True])
async def test_a_model_plays_the_user(store: Store, tmp_path: Path, own_engine: bool) -> None:
    """Its calls are recorded in a session of their own, which exports and traces leave out."""

    def script(request: EngineRequest) -> ScriptedAnswer:
        assert isinstance(request, ChatRequest)
        if request.messages[0].role == "system":
            return USER_MODEL(request)
        return agent_model(request)

    settings = Settings()
    if own_engine:
        settings = Settings(
            engines={"users": EngineSettings(kind="tests.rollouts.test_dialogue:UserEngine")},
            routes=(RouteSettings(name="users", engine="users", labels=("user of *",)),),
        )
    given = agent_model if own_engine else script
    row = await run_dialogue(store, tmp_path, DialogueUser(persona="You like green."), given, settings=settings)
    assert (row.status, row.reward) == ("done", 1.0)
    users = [session for session in await store.sessions.recent() if session.origin == "user"]
    assert [(one.label, one.calls, one.rollout_id) for one in users] == [(f"user of {row.rollout_id}", 2, None)]
    assert users[0].closed_at is not None
    assert [target.session_id for target in await find_targets(store)] == [row.session_id]
    assert row.session_id is not None
    assert len(await store.calls.of_session(row.session_id)) == 2


def USER_MODEL(request: EngineRequest) -> ScriptedAnswer:
    assert isinstance(request, ChatRequest)
    assert str(request.messages[0].content).startswith("You like green.")
    said = [(message.role, message.content) for message in request.messages[2:]]
    assert said[:2] == [("assistant", "paint it red"), ("user", "ok 1")]
    return "and now green" if len(said) == 2 else f"Thanks. {DONE}"


class UserEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(USER_MODEL)


async def test_a_text_of_a_user_model_fits_on_a_command_line(serve: Serve) -> None:
    async with serve(ScriptedEngine(lambda request: "a\0b" + "ü" * 100_000)) as gateway:
        text = await PlayedUser("x", gateway.url, "my-user").answer([DialogueMessage("user", "hi")])
    assert text is not None
    assert text.startswith("ab")
    assert len(text.encode()) < 128 << 10


@pytest.mark.slow
@pytest.mark.usefixtures("own_sandbox_register")
async def test_a_user_model_that_fails_is_no_fault_of_the_agent(store: Store, tmp_path: Path) -> None:
    def script(request: EngineRequest) -> ScriptedAnswer:
        assert isinstance(request, ChatRequest)
        if request.messages[0].role == "system":
            return EngineError("no user today", status=500)
        return agent_model(request)

    row = await run_dialogue(store, tmp_path, DialogueUser(persona="You like green."), script)
    assert (row.status, row.cause, row.reward) == ("failed", "engine", None)
    assert "the model that plays the user did not answer" in (row.error or "")


def test_user_must_be_given_as_texts_or_persona() -> None:
    with pytest.raises(BadTaskError, match="texts or a persona"):
        dialogue_task(DialogueUser())
