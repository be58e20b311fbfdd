"""Random and damaged bodies over HTTP, to all model routes: each gets an answer or a 4xx in the route's own format.

`scripts/random_bodies.py` sends ten thousand of them.
"""

from __future__ import annotations

import random

import httpx
import pytest

from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.random_bodies import ROUTES, RandomAnswers, find_fault, send_random_bodies

pytestmark = pytest.mark.slow

_BODIES = 400


async def test_answers_random_bodies_in_the_routes_own_format(
    serve: Serve, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(RandomAnswers(random.Random(7))) as gateway:
        report = await send_random_bodies(gateway, store, _BODIES, seed=7)
    with capsys.disabled():
        print("\n" + report.table())
    assert report.wrong == []
    assert report.total.total() == _BODIES
    for name in ROUTES:  # both kinds on every route, else the bodies are not varied enough
        assert report.statuses[name][200] >= 3, name
        assert report.statuses[name][400] >= 3, name


_EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
_GOOD = b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'


@pytest.mark.parametrize(
    ("name", "answer", "wrong"),
    [
        ("chat", httpx.Response(400, content=_GOOD), None),
        ("chat", httpx.Response(200, json={"choices": []}), None),
        ("chat", httpx.Response(200, content=b'data: {"choices": []}\n\ndata: [DONE]\n\n', headers=_EVENTS), None),
        ("chat", httpx.Response(500, content=_GOOD), "status 500"),
        ("chat", httpx.Response(200, json={"output": []}), "no 'choices'"),
        ("chat", httpx.Response(400, content=b"Bad Request"), "unreadable"),
        ("chat", httpx.Response(200, content=b"data: " + _GOOD + b"\n\n", headers=_EVENTS), "inside a stream"),
        ("messages", httpx.Response(400, content=_GOOD), "unreadable"),
        ("countTokens", httpx.Response(404, json={"error": {"code": 400, "message": "m", "status": "X"}}), "shape"),
    ],
)
def test_finds_wrong_answers(name: str, answer: httpx.Response, wrong: str | None) -> None:
    found = find_fault(ROUTES[name], answer)
    assert found == wrong if wrong is None else wrong in str(found)
