"""Bodies that no client means, over HTTP and all model routes: each gets an answer or a 4xx in the route's own shape.

Ten thousand of them: scripts/random_bodies.py.
"""

from __future__ import annotations

import random

import pytest

from polar_proxy.store import Store
from tests.conftest import Serve
from tests.gateway.random_bodies import ROUTES, AnyAnswer, storm

_BODIES = 400


async def test_random_bodies(serve: Serve, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    async with serve(AnyAnswer(random.Random(7))) as gateway:
        report = await storm(gateway, store, _BODIES, seed=7)
    with capsys.disabled():
        print("\n" + report.table())
    assert report.wrong == []
    assert report.total.total() == _BODIES
    for name in ROUTES:  # both kinds on every route, or the bodies are not what they are meant to be
        assert report.statuses[name][200] >= 3, name
        assert report.statuses[name][400] >= 3, name
