"""Hostile requests and callback URLs (`benchmarks/_attacks/hostile_rows.py`): each is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from benchmarks._attacks.hostile_rows import Attack, api_attacks, callback_attacks
from polar_proxy.api_models import requests
from polar_proxy.rollout_spec import MAX_INTEGER, JobSpec
from tests.api.conftest import ServeApi

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("attack", [*api_attacks(), *callback_attacks()], ids=lambda attack: attack[0])
async def test_hostile_requests_are_refused(attack: Attack, tmp_path: Path) -> None:
    _, _, honest, send = attack
    reached, got = await send(tmp_path, tmp_path / "ran")
    assert reached == honest, got


def integers(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of integers within a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            yield schema
        for inside in schema.values():
            yield from integers(inside)
    elif isinstance(schema, list):
        for inside in schema:
            yield from integers(inside)


REQUESTS = [*JobSpec.__subclasses__(), *requests.ApiRequestModel.__subclasses__(), requests.TrainingLine]


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_integers_of_requests_fit_into_the_databases_columns(model: type[BaseModel]) -> None:
    found = integers(model.model_json_schema())
    assert [schema for schema in found if schema.get("maximum", MAX_INTEGER + 1) > MAX_INTEGER] == []


@pytest.mark.parametrize("task", ["a" * 3000, "a/" * 3000, "~nobody-has-this-name/a", "\0", "/\0"])
async def test_names_that_no_file_can_have_are_refused(serve_api: ServeApi, task: str) -> None:
    async with serve_api() as running:
        answer = await running.post("/jobs", {"task": task, "harness": "mini-swe-agent"}, status=400)
    assert answer["error"]["code"] == "bad_request"
