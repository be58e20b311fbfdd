"""A program for an ordinary user: intercept one call of a bubblewrap sandbox, and print as JSON what happened.

python -m tests.intercept.unprivileged_sandbox FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from polar_proxy.config import GatewaySettings
from polar_proxy.engines.scripted import ScriptedEngine
from polar_proxy.gateway import Gateway
from polar_proxy.rollouts.interception import SandboxInterception
from polar_proxy.store import open_store
from sandboxes.base import SandboxSpec
from sandboxes.bubblewrap import require_bwrap
from sandboxes.choice import open_sandbox
from tests.gateway.agents import new_session
from tests.intercept.test_sandboxes import ask


async def main(folder: Path) -> None:
    require_bwrap()
    interception = SandboxInterception(folder / "home")
    spec = await interception.spec("bubblewrap", SandboxSpec())
    async with open_store(f"sqlite:///{folder}/polar.db") as store, ScriptedEngine() as engine:
        session_id = await new_session(store, "sk-polar-rollout")
        async with (
            Gateway(engine, store, GatewaySettings(port=0)) as gateway,
            await open_sandbox("bubblewrap", spec, state_dir=folder / "state") as sandbox,
            interception.serve(gateway, sandbox, "sk-polar-rollout"),
        ):
            answered = await ask(sandbox, "https://api.openai.com/v1/chat/completions")
        calls = await store.calls.of_session(session_id)
    status = answered.stdout.decode().partition(" ")[0]
    print(json.dumps({"user": os.geteuid(), "status": status, "recorded": [call.status for call in calls]}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
