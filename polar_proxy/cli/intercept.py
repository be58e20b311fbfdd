"""`polar intercept`: start a program with a proxy that sends its model calls to a Polar server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, get_args

import typer

from polar_proxy.cli import options
from polar_proxy.cli.agent_session import AgentSession, open_session, run_in_foreground
from polar_proxy.cli.common import load_client_settings
from polar_proxy.cli.output import print_note, spinner
from polar_proxy.config import Settings, child_environment
from polar_proxy.errors import UsageError
from polar_proxy.intercept.certificates import open_authority
from polar_proxy.intercept.proxy import Mitmproxy, Others, ProxySettings, run_proxy
from polar_proxy.intercept.variables import intercepted_variables
from polar_proxy.types import Json


def intercept(
    command: Annotated[list[str], typer.Argument(metavar="-- PROGRAM ARGUMENTS", help="The program to start.")],
    others: Annotated[
        str,
        typer.Option(help="Requests to hosts that serve no models: pass, refuse, or list (pass, and list the hosts)."),
    ] = "pass",
    key: Annotated[str | None, typer.Option(help="Key of the session. Default: make a new session.")] = None,
    url: options.ServerUrl = None,
    db: options.Db = None,
) -> None:
    """Start a program whose model endpoint cannot be set, and answer its model calls: `polar intercept -- PROGRAM`.

    The program gets environment variables for a proxy on loopback and for the proxy's certificate authority, which only
    this program trusts. Calls of the program to the hosts of OpenAI, ChatGPT, Anthropic, Google, Azure, Bedrock,
    OpenRouter, Mistral and GitHub Copilot go to the server, which answers and records them. The program's own key is
    removed from these calls. If the server was started as `polar serve --engine passthrough`, the calls keep the key:
    the provider answers them, and the server records them.
    """
    options.require_choice("others", others, get_args(Others))
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"There is no program {command[0]!r} on PATH.")
    settings = load_client_settings(url, db)
    session = open_session(Path(program).name, settings, url, db, key, None)
    raise typer.Exit(_run(settings, session, [program, *command[1:]], others))  # type: ignore[arg-type]  # checked


def _run(settings: Settings, session: AgentSession, command: list[str], others: Others) -> int:
    mitmproxy = Mitmproxy()
    if not mitmproxy.is_installed(settings.harness_cache):
        with spinner("installing mitmproxy", quiet=False):
            mitmproxy.install(settings.harness_cache)
    installed = mitmproxy.install(settings.harness_cache)
    authority = open_authority(settings.home)
    proxy = ProxySettings(session.server, session.key, record=session.model.provider_answers, others=others)
    events = ProxyEvents(Path(command[0]).name)
    with run_proxy(installed, authority, proxy, events.add) as port:
        code = run_in_foreground(command, child_environment(intercepted_variables(authority, port)))
    if others == "list" and events.others:
        print_note(f"other hosts: {', '.join(sorted(events.others))}")
    if session.session_id is not None:
        print_note(f"recorded as {session.session_id}; to see it: polar show {session.session_id}")
    return code


class ProxyEvents:
    """Prints the proxy's failures and refusals, and collects in `others` the hosts that are not model hosts."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.others: set[str] = set()

    def add(self, event: Json) -> None:
        host = event["host"]
        match event["event"]:
            case "other":
                self.others.add(host)
            case "refused":
                print_note(f"refused: {host}, which is not a model host")
            case "unreachable":
                print_note(
                    f"the Polar server did not answer a request of {self._program} for {host}: {event['reason']}"
                )
            case "untrusted":
                print_note(
                    f"{self._program} did not accept Polar's certificate for {host}, so its calls there cannot be "
                    "intercepted: it pins the provider's certificate, or reads none of the variables that name other "
                    f"certificates ({event['reason']}). Look for a setting of {self._program} that names certificates "
                    f"or the endpoint; `polar connect` lists the agents whose endpoint Polar can set."
                )
