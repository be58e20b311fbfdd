"""Several engines behind one gateway: which calls each gets, what is recorded, and that their tokens never mix."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_proxy.config import GatewaySettings, RouteSettings
from polar_proxy.engines.scripted import INFO, ScriptedEngine
from polar_proxy.errors import UsageError
from polar_proxy.gateway import Gateway
from polar_proxy.sessions.state import SessionState
from polar_proxy.store import Store
from polar_proxy.traces.builders import build
from tests.cli.runner import polar
from tests.gateway.agents import client, new_session

pytestmark = pytest.mark.slow

KEY = "sk-routed-of-the-test"
OTHER = replace(INFO, model="other-model")


def rule(name: str = "rule", engine: str = "other", **conditions: Any) -> RouteSettings:
    return RouteSettings(name=name, engine=engine, **conditions)


class TwoEngines:
    """A gateway with an engine of its own and one called `other`."""

    def __init__(self, store: Store, *rules: RouteSettings, other: type[ScriptedEngine] = ScriptedEngine) -> None:
        main = ScriptedEngine(lambda request: "from main")
        second = other(lambda request: "from other", info=OTHER)
        self.gateway = Gateway(main, store, GatewaySettings(port=0), engines={"other": second}, routes=rules)

    async def ask(self, model: str, messages: list[Any], key: str = KEY) -> str:
        async with client(self.gateway.url, key) as http:
            answer = await http.post("/chat/completions", json={"model": model, "messages": messages})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_models_map_to_engines(store: Store) -> None:
    session = await new_session(store, KEY)
    engines = TwoEngines(store, rule("small", models=("claude-haiku-*", "mini")))
    async with engines.gateway:
        named = ("claude-haiku-4-5", "claude-opus-4", "mini", "minimal")
        answers = [await engines.ask(model, [user(model)]) for model in named]
    assert answers == ["from other", "from main", "from other", "from main"]
    calls = await store.calls.of_session(session)
    recorded = [(call.model, call.engine_name, call.route, call.engine and call.engine.model) for call in calls]
    assert recorded == [
        ("claude-haiku-4-5", "other", "small", "other-model"),
        ("claude-opus-4", None, None, "scripted-model"),
        ("mini", "other", "small", "other-model"),
        ("minimal", None, None, "scripted-model"),
    ]


async def test_the_model_list_begins_with_the_main_engine(store: Store) -> None:
    engines = {"other": ScriptedEngine(info=OTHER), "second": ScriptedEngine()}
    gateway = Gateway(ScriptedEngine(), store, GatewaySettings(port=0), engines=engines)
    async with gateway, client(gateway.url, KEY) as http:
        models = (await http.get("/models")).json()["data"]
    assert [model["id"] for model in models] == ["scripted-model", "other-model"]


async def test_labels_choose_an_engine(store: Store) -> None:
    engines = TwoEngines(store, rule(labels=("experiment-*",)))
    async with engines.gateway:
        # A key of plain words is the session's label.
        assert await engines.ask("m", [user("hi")], key="experiment-7") == "from other"
        assert await engines.ask("m", [user("hi")], key="baseline-7") == "from main"


def test_a_share_of_the_sessions_is_steady_and_independent() -> None:
    def chosen(name: str, share: float, session_id: str) -> bool:
        engines = TwoEnginesRouter(rule(name, share=share))
        return engines.chooses_other(session_id)

    ids = [f"sess_{number:05d}" for number in range(4000)]
    for share in (0.05, 0.3, 1.0):
        count = sum(chosen("candidate", share, session_id) for session_id in ids)
        assert abs(count - share * len(ids)) < 4 * (share * (1 - share) * len(ids)) ** 0.5 + 1
    assert [chosen("candidate", 0.3, one) for one in ids[:99]] == [chosen("candidate", 0.3, one) for one in ids[:99]]
    # A session that is in a small share is in each larger one, and two rules draw independently.
    assert all(chosen("candidate", 0.5, one) for one in ids if chosen("candidate", 0.2, one))
    pairs = Counter((chosen("a", 0.5, one), chosen("b", 0.5, one)) for one in ids)
    assert all(800 < count < 1200 for count in pairs.values())


class TwoEnginesRouter:
    """The router of a gateway that never starts."""

    def __init__(self, *rules: RouteSettings) -> None:
        from polar_proxy.gateway.routing import EngineRouter, ServedEngine

        def served(name: str | None) -> ServedEngine:
            nothing: Any = None
            return ServedEngine(name, ScriptedEngine(), nothing, nothing, nothing)

        self._router = EngineRouter(served(None), {"other": served("other")}, rules)

    def chooses_other(self, session_id: str) -> bool:
        return self._router.choose(SessionState(session_id, {}), "m").served.name == "other"


async def test_never_joins_tokens_of_two_engines(store: Store) -> None:
    session = await new_session(store, KEY)
    engines = TwoEngines(store, rule(models=("big",)))
    messages = [user("hi")]
    async with engines.gateway:
        for model in ("small", "small", "big", "big", "small"):
            messages += [{"role": "assistant", "content": await engines.ask(model, messages)}, user("go on")]
    calls = await store.calls.of_session(session)
    assert [(call.engine_name, call.prompt_mode, call.prompt_reason) for call in calls] == [
        (None, "render", "no_base"),
        (None, "continue", None),
        ("other", "render", "other_engine"),
        ("other", "continue", None),
        (None, "render", "other_engine"),
    ]
    engine_of = {call.call_id: call.engine_name for call in calls}
    for builder in ("per_call", "merged", "tree"):
        result = build(calls, builder)
        trained = [call_id for trace in result.traces for call_id in trace.call_ids]
        assert sorted(trained) == sorted(engine_of), builder
        assert all(len({engine_of[call_id] for call_id in trace.call_ids}) == 1 for trace in result.traces), builder
    assert build(calls, "merged").drift_events == ()


async def test_a_restart_does_not_continue_from_another_engine(store: Store) -> None:
    session = await new_session(store, KEY)
    messages = [user("hi")]
    for model in ("small", "big"):
        engines = TwoEngines(store, rule(models=("big",)))
        async with engines.gateway:
            messages += [{"role": "assistant", "content": await engines.ask(model, messages)}, user("go on")]
    assert [call.prompt_reason for call in await store.calls.of_session(session)] == ["no_base", "other_engine"]


class FullEngine(ScriptedEngine):
    async def health(self) -> str | None:
        return "out of memory"


async def test_reports_an_engine_that_is_down(store: Store) -> None:
    engines = TwoEngines(store, rule(), other=FullEngine)
    async with engines.gateway, client(engines.gateway.url) as http:
        ready = await http.get(f"{engines.gateway.url}/readyz")
        models = await http.get(f"{engines.gateway.url}/v1/models")
    assert ready.status_code == 503
    assert ready.json()["sample"]["reason"] == "engine other: out of memory"
    assert [card["id"] for card in models.json()["data"]] == ["scripted-model", "other-model"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            '[[routes]]\nname = "a"\nengine = "big"\n',
            "the route a names the engine big, which [engines] does not define; it defines: none",
        ),
        (
            '[engines.big]\nkind = "scripted"\n' + 2 * '[[routes]]\nname = "a"\nengine = "big"\n',
            "two routes have the name a",
        ),
        ('[engines.big]\nkind = "scripted"\n[[routes]]\nname = "a"\nengine = "big"\nshare = 2\n', "less than or equal"),
        ('[engines.big]\nkind = "vllm"\n', "The engine big of [engines] cannot be used"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(
    text: str, problem: str, polar_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "polar.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = polar("serve", "--engine", "scripted", "--port", "0")
    assert done.exit_code == UsageError.exit_code
    assert problem in done.stderr.replace("\n", " ")
