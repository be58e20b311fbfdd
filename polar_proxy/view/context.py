"""The objects that all pages use."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from polar_proxy.api import ApiContext
from polar_proxy.store import Store
from polar_proxy.view.access import COOKIE, PageAccess
from polar_proxy.view.changes import ChangeStreams
from polar_proxy.view.engine_values import EngineValues
from polar_proxy.view.templates import render
from polar_proxy.view.token_source import TokenSources

NAVIGATION = (
    ("Overview", "/"),
    ("Rollouts", "/view/rollouts"),
    ("Sessions", "/view/sessions"),
    ("Groups", "/view/groups"),
    ("Jobs", "/view/jobs"),
    ("Training", "/view/training"),
    ("Compare", "/view/compare"),
)


@dataclass(frozen=True)
class ViewContext:
    """The parts of a server that its pages need: the API's context (with the store), the login of visitors (`access`),
    and the pages' caches."""

    api: ApiContext
    access: PageAccess
    writable: bool = True
    """Whether visitors can give remarks and rewards in the pages."""
    tokens: TokenSources = field(default_factory=TokenSources)
    changes: ChangeStreams = field(default_factory=ChangeStreams)

    @cached_property
    def engine_values(self) -> EngineValues:
        main = () if self.api.engine is None else (self.api.engine,)
        return EngineValues((*main, *self.api.engines.values()))

    @property
    def store(self) -> Store:
        return self.api.store

    async def page(self, request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
        """Return a page made from `template`, with the navigation that every page has."""
        common = {
            "navigation": NAVIGATION,
            "path": request.url.path,
            "location": self.store.location,
            "logged_in": COOKIE in request.cookies,
        }
        return await render(template, status=status, **common, **values)
