"""In a sandbox, model hosts resolve to the gateway: no variable names a proxy, and everything else is unreachable."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from polar_proxy.engines.passthrough.engine import PassthroughEngine
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.errors import UsageError
from polar_proxy.rollouts.interception import SandboxInterception
from polar_proxy.store import Store
from sandboxes.base import ExecResult, Sandbox, SandboxError, SandboxKind, SandboxSpec
from sandboxes.choice import open_sandbox
from tests.conftest import Serve
from tests.gateway.agents import new_session, only_call
from tests.gateway.test_passthrough import Provider
from tests.sandboxes.conftest import reasons  # noqa: F401

pytestmark = pytest.mark.slow

KINDS: list[object] = ["bubblewrap", pytest.param("docker", marks=pytest.mark.full)]
NOBODY = 65534
AS_NOBODY = ("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups")
PROGRAM = "tests.intercept.unprivileged_sandbox"
CLIENT = """
import json, ssl, sys, urllib.error, urllib.request
body = json.dumps({"model": "gpt-5", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer sk-of-the-agent"}
try:
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, headers), timeout=20) as reply:
        print(reply.status, reply.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("unreachable", error)
"""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, reasons: dict[str, str]) -> SandboxKind:  # noqa: F811
    if request.param in reasons:
        pytest.skip(reasons[request.param])
    return request.param  # type: ignore[no-any-return]


async def ask(sandbox: Sandbox, url: str, **env: str) -> ExecResult:
    done = await sandbox.exec(["python3", "-I", "-c", CLIENT, url], env=env, timeout=60)
    assert done.exit_code == 0, done.stderr
    return done


async def test_calls_to_a_model_host_are_answered_and_recorded_and_nothing_else_is_reachable(
    kind: SandboxKind, serve: Serve, store: Store, tmp_path: Path
) -> None:
    interception = SandboxInterception(tmp_path / "home")
    session_id = await new_session(store, "sk-polar-rollout")
    spec = await interception.spec(kind, SandboxSpec())
    async with (
        serve(ScriptedEngine(lambda request: "the answer")) as gateway,
        await open_sandbox(kind, spec, state_dir=tmp_path / "state") as sandbox,
        interception.serve(gateway, sandbox, "sk-polar-rollout"),
    ):
        answered = await ask(sandbox, "https://api.openai.com/v1/chat/completions")
        status, _, body = answered.stdout.decode().partition(" ")
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == ("200", "the answer")
        for url in ("https://api.openai.com/v1/files", "https://api.anthropic.com/api/oauth/profile"):
            assert (await ask(sandbox, url)).stdout.startswith(b"404")
        for url in ("https://example.com", "https://169.254.169.254/", "https://1.1.1.1/"):
            assert (await ask(sandbox, url)).stdout.startswith(b"unreachable")
        names = await sandbox.exec(["cat", "/etc/hosts"])
        assert b"api.anthropic.com" in names.stdout
    call = await only_call(store)
    assert (call.session_id, call.status) == (session_id, "ok")


async def test_names_that_a_provider_gave_to_the_user_are_answered(
    kind: SandboxKind, serve: Serve, store: Store, tmp_path: Path
) -> None:
    own = "my-resource.openai.azure.com"
    interception = SandboxInterception(tmp_path / "home", [own])
    await new_session(store, "sk-polar-rollout")
    spec = await interception.spec(kind, SandboxSpec())
    async with (
        serve(ScriptedEngine(lambda request: "the answer"), model_hosts=[own]) as gateway,
        await open_sandbox(kind, spec, state_dir=tmp_path / "state") as sandbox,
        interception.serve(gateway, sandbox, "sk-polar-rollout"),
    ):
        path = "/openai/deployments/gpt/chat/completions?api-version=1"
        assert (await ask(sandbox, f"https://{own}{path}")).stdout.startswith(b"200")
        assert (await ask(sandbox, f"https://another.openai.azure.com{path}")).stdout.startswith(b"unreachable")
    assert (await only_call(store)).status == "ok"


async def test_a_provider_answers_the_calls_of_a_sandbox_with_the_agents_key(
    kind: SandboxKind, serve: Serve, store: Store, tmp_path: Path
) -> None:
    """The sandbox reaches no provider itself: the gateway passes its model calls on, and refuses all other paths."""
    choice = {"index": 0, "message": {"content": "from the provider"}, "finish_reason": "stop"}
    body = json.dumps({"id": "x", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}).encode()
    provider = Provider(headers=[("content-type", "application/json")], body=body)
    interception = SandboxInterception(tmp_path / "home")
    await new_session(store, "sk-polar-rollout")
    spec = await interception.spec(kind, SandboxSpec())
    async with (
        provider.serve() as url,
        serve(PassthroughEngine(url)) as gateway,
        await open_sandbox(kind, spec, state_dir=tmp_path / "state") as sandbox,
        interception.serve(gateway, sandbox, "sk-polar-rollout"),
    ):
        answered = await ask(sandbox, "https://api.openai.com/v1/chat/completions?a=b")
        assert answered.stdout.decode().strip() == f"200 {body.decode()}"
        assert (await ask(sandbox, "https://api.openai.com/v1/files")).stdout.startswith(b"404")
    ((first, headers, _),) = provider.requests
    assert first == "POST /v1/chat/completions?a=b HTTP/1.1"
    assert headers["authorization"] == "Bearer sk-of-the-agent"
    call = await only_call(store)
    assert (call.status, call.choices[0].message.content) == ("no_tokens", "from the provider")
    assert call.usage is not None
    assert call.usage.output_tokens == 2


def python_of_nobody() -> str:
    """Return a Python of this version that any user may start, also from its own processes."""
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for program in filter(None, (sys.executable, shutil.which(name, path=os.defpath))):
        tried = subprocess.run([*AS_NOBODY, program, "-c", again], capture_output=True, check=False)
        if tried.returncode == 0:
            return program
    pytest.skip(f"install {name} where every user may start it, or the environment outside of root's home")


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_a_user_without_privileges_intercepts_calls_too(kind: SandboxKind) -> None:
    if os.geteuid() != 0:
        pytest.skip("run as root: the other tests of this module then run as root, and this one as another user")
    # Not in pytest's own folder, which only root may enter.
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        process = await asyncio.create_subprocess_exec(
            *(*AS_NOBODY, python_of_nobody(), "-m", PROGRAM, folder),
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await asyncio.wait_for(process.communicate(), 120)
    if b"bwrap fails" in error:
        pytest.skip(f"this machine lets no ordinary user make namespaces: {error.decode().splitlines()[-1]}")
    assert process.returncode == 0, error.decode()
    assert json.loads(out) == {"user": NOBODY, "status": "200", "recorded": ["ok"]}


async def test_the_private_key_is_not_in_the_sandbox(kind: SandboxKind, tmp_path: Path) -> None:
    home = tmp_path / "home"
    spec = await SandboxInterception(home).spec(kind, SandboxSpec())
    async with await open_sandbox(kind, spec, state_dir=tmp_path / "state") as sandbox:
        found = await sandbox.exec(["find", str(home), "-type", "f"])
    assert {Path(line).name for line in found.stdout.decode().split()} == {"ca.pem", "bundle.pem", "java.p12"}


async def test_a_host_name_that_the_certificate_does_not_have_is_refused_by_the_client(
    kind: SandboxKind, serve: Serve, tmp_path: Path
) -> None:
    interception = SandboxInterception(tmp_path / "home")
    spec = await interception.spec(kind, SandboxSpec())
    async with (
        serve(ScriptedEngine()) as gateway,
        await open_sandbox(kind, spec, state_dir=tmp_path / "state") as sandbox,
        interception.serve(gateway, sandbox, "sk-polar-rollout"),
    ):
        assert b"certificate verify failed" in (await ask(sandbox, "https://localhost/v1/messages")).stdout


async def test_a_process_sandbox_cannot_be_intercepted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use --sandbox bubblewrap or docker"):
        await SandboxInterception(tmp_path).spec("process", SandboxSpec())
    with pytest.raises(SandboxError, match="uses the host's name resolution"):
        await open_sandbox("process", SandboxSpec(hosts=("api.openai.com",)), state_dir=tmp_path / "state")
