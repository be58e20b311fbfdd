"""Open the session (server, model and key) that `polar connect` and `polar intercept` give a program, and start the
program."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from harness_adapters.base import Endpoint
from polar_proxy.cli.common import is_local_url, with_client
from polar_proxy.config import Settings, local_url
from polar_proxy.errors import UsageError

_REQUEST_SECONDS = 1800.0
"""Time limit of the agent's model calls. A laptop may take minutes to read a long prompt."""


@dataclass(frozen=True)
class ModelCard:
    name: str
    context_length: int | None
    max_answer: int | None
    """Maximum number of tokens in an answer; None if only the context length limits it."""
    provider_answers: bool
    """True if the server forwards calls to the provider, with the agent's own key: all calls, or those that a rule
    chooses."""


@dataclass(frozen=True)
class AgentSession:
    """The session that an agent is pointed at."""

    server: str
    """URL of the Polar server, without /v1."""
    key: str
    session_id: str | None
    """Id of the session; None if the user gave the key, because the id is then unknown."""
    model: ModelCard

    def endpoint(self, home: Path) -> Endpoint:
        """Return the endpoint for an agent whose settings are in the folder `home`."""
        return Endpoint(
            base_url=f"{self.server}/v1",
            api_key=self.key,
            model=self.model.name,
            context_length=self.model.context_length,
            home=str(home),
            request_timeout_seconds=_REQUEST_SECONDS,
        )


def open_session(
    label: str, settings: Settings, url: str | None, db: str | None, key: str | None, model: str | None
) -> AgentSession:
    """Ask the server for its model, and make a session unless a key is given.

    Without a URL the session is made in the database, as by `polar session new`.
    """
    server = _server_url(settings)
    served = _ask_model(server)
    if model is not None:
        served = replace(served, name=_printable("--model", model))
    if key is not None:
        if not key.isascii() or not key.isprintable() or not key or " " in key:
            raise UsageError("--key must consist of visible ASCII characters, so that an HTTP header can carry it.")
        return AgentSession(server, key, None, served)
    from polar_proxy.api_models import SessionRequest
    from polar_proxy.client import UnauthorisedError

    request = SessionRequest(label=label)
    try:
        created = with_client(url, db, lambda client: client.new_session(request), create=True)
    except UnauthorisedError as error:
        raise UsageError(f"{error} Or give the key of a session: --key KEY.") from error
    return AgentSession(server, created.key, created.session_id, served)


def _server_url(settings: Settings) -> str:
    """Return the URL of the server without /v1. Raises UsageError if the URL is invalid, or if none is given and the
    server's port is not known."""
    if settings.url is not None:
        is_local_url(settings.url)  # validates it
        return settings.url.rstrip("/").removesuffix("/v1")
    if settings.gateway.port == 0:
        raise UsageError("The setting gateway.port is 0, so the server's port is not known: give --url.")
    return local_url(settings.gateway.host, settings.gateway.port)


def _ask_model(server: str) -> ModelCard:
    """Return the model of the server's engine. Raises UsageError if there is no Polar server at this URL."""
    import httpx

    try:
        reply = httpx.get(f"{server}/v1/models", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(
            f"No server answers at {server} ({type(error).__name__}: {error}). Start one with `polar serve`, or name a "
            "running one with --url."
        ) from error
    try:
        cards = reply.json()["data"]
        card = cards[0]  # the others are those of [engines], to which only rules send calls
        if card["owned_by"] != "polar":
            raise ValueError(card["owned_by"])
        length, answer, name = card["max_model_len"], card["max_tokens"], str(card["id"])
        provider_answers = any(one["engine"] == "passthrough" for one in cards)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"{server} is not a Polar server: its list of models is not Polar's.") from error
    context_length = length if isinstance(length, int) else None
    max_answer = answer if isinstance(answer, int) and answer != context_length else None
    return ModelCard(_printable("The model of the server", name), context_length, max_answer, provider_answers)


def _printable(what: str, name: str) -> str:
    if not name or not name.isprintable():
        raise UsageError(f"{what} is {name!r}: a model name must be printable text.")
    return name


def run_in_foreground(argv: Sequence[str], environment: dict[str, str]) -> int:
    """Run a program on this terminal and return its exit code, as a shell reports it.

    Ctrl-C reaches the program from the terminal, and does not end this process. SIGTERM and SIGHUP are passed on.
    """
    process: subprocess.Popen[bytes] | None = None
    came_early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            return
        if process is None:
            came_early.append(number)
        else:
            process.send_signal(number)

    # Handlers instead of SIG_IGN, which the program would inherit.
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        process = subprocess.Popen(argv, env=environment)
        for number in came_early:
            process.send_signal(number)
        code = process.wait()
    except OSError as error:
        raise UsageError(f"{argv[0]} cannot be started: {error.strerror}.") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
