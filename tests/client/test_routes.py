"""Client and server know the same routes, by the server's own OpenAPI document; each has its section in
docs/reference/api_examples.md."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from polar_proxy import api_models as m
from polar_proxy.api import create_api
from polar_proxy.client.requests import ApiCall, ApiStream, api_method
from polar_proxy.client.routes import ApiMethods
from polar_proxy.config import Settings
from polar_proxy.store import open_store
from tests.client.test_docs import PAGE

BODIES: dict[str, Any] = {
    "submit": m.JobRequest(task="swe-task"),
    "reward": m.RewardRequest(rollout_id="roll_1", value=1.0, source="me"),
    "remark": m.RemarkRequest(rollout_id="roll_1", kind="label", text="odd"),
    "new_session": m.SessionRequest(),
    "new_key": m.KeyRequest(role="trainer"),
    "lease": m.LeaseRequest(consumer="me"),
    "put_training_run": m.TrainingRunRequest(name="mine", config={}),
    "add_training_lines": m.TrainingLinesRequest(first=0, lines=[]),
}


class RecordedMethods(ApiMethods):
    """Return the requests instead of sending them."""

    def send(self, call: ApiCall[Any]) -> Any:
        return call

    def stream(self, stream: ApiStream[Any]) -> Any:
        return stream


def client_routes() -> set[tuple[str, str]]:
    found = set()
    for name in dir(ApiMethods):
        if not isinstance(getattr(ApiMethods, name), api_method):
            continue
        # Ids are named as in the server's paths; `cancel` takes three kinds of id.
        kinds = ("job_id", "group_id", "rollout_id") if name == "cancel" else (None,)
        method = getattr(RecordedMethods(), name)
        for kind in kinds:
            given: list[Any] = []
            for parameter in inspect.signature(method).parameters.values():
                if parameter.default is inspect.Parameter.empty:
                    of_name = {"request": BODIES.get(name), "seconds": 1.0, "target": f"{str(kind)[:-2]}1"}
                    given.append(of_name.get(parameter.name, f"<{parameter.name}>"))
            made = method(*given)
            path = made.path.replace("%3C", "{").replace("%3E", "}")
            path = path.replace(f"{str(kind)[:-2]}1", "{" + str(kind) + "}")
            found.add((getattr(made, "method", "GET"), m.API_PREFIX + path))
    return found


async def test_client_and_server_have_the_same_routes(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/polar.db") as store:
        document = create_api(store, settings=Settings(home=tmp_path)).openapi()
    served = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert client_routes() == served
    assert len(served) > 25
    # Each path is in a shell example, with any variables as ids.
    words = [
        part for _, path in served for part in path.removeprefix(m.API_PREFIX).split("/") if part and part[0] != "{"
    ]
    assert {word for word in words if f"/{word}" not in PAGE} == set()
