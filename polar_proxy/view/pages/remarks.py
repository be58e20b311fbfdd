"""Labels, notes, ratings and rewards that people give to rollouts and sessions on their pages."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from polar_proxy.api.context import require
from polar_proxy.errors import UsageError
from polar_proxy.store import Store
from polar_proxy.store.repositories.remarks import REMARK_KINDS
from polar_proxy.view.context import ViewContext
from polar_proxy.view.forms import read_form

_MOST_REWARD = 1e6


def add_routes(pages: APIRouter, view: ViewContext) -> None:
    if not view.writable:
        return
    store = view.store

    @pages.post("/view/remarks/rollouts/{rollout_id}")
    async def of_rollout(request: Request, rollout_id: str) -> Response:
        await require("rollout", rollout_id, store.rollouts.get(rollout_id))
        await _give(request, store, rollout_id=rollout_id)
        return RedirectResponse(f"/view/rollouts/{rollout_id}#remarks", status_code=303)

    @pages.post("/view/remarks/sessions/{session_id}")
    async def of_session(request: Request, session_id: str) -> Response:
        session = await require("session", session_id, store.sessions.get(session_id))
        if session.rollout_id is not None:
            raise UsageError("This session belongs to a rollout. Label, rate or reward the rollout instead.")
        await _give(request, store, session_id=session_id)
        return RedirectResponse(f"/view/sessions/{session_id}#remarks", status_code=303)


async def _give(
    request: Request, store: Store, *, rollout_id: str | None = None, session_id: str | None = None
) -> None:
    """Store the remark or reward that a form sends, with the name of the visitor's key as its author. Raises UsageError
    for an unknown kind or a bad value."""
    form = await read_form(request)
    name, text, author = form.get("kind", ""), form.get("value", ""), request.state.visitor.name
    if name == "reward":
        await store.rewards.add(rollout_id, _number(text), f"person: {author}", {}, session_id=session_id)
        return
    kind = REMARK_KINDS.get(name)
    if kind is None:
        raise UsageError(f"A remark is a label, a note, a rating or a reward, not {name!r}.")
    rating = _number(text) if kind == "rating" else None
    await store.remarks.add(kind, author, rollout_id=rollout_id, session_id=session_id, text=text, rating=rating)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number.") from None
    if not math.isfinite(value) or abs(value) > _MOST_REWARD:
        raise UsageError(f"{text!r} is not a number between -1,000,000 and 1,000,000.")
    return value
