"""Options that several commands share, and options made from the fields of a pydantic model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from types import NoneType
from typing import Annotated, Any, get_args

import typer
from annotated_types import Ge
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from polar_proxy.documented import field_descriptions
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import SessionBudget


def require_choice(what: str, value: str, choices: Collection[str]) -> None:
    """Raise UsageError if `value` is not one of the choices."""
    if value not in choices:
        raise UsageError(f"There is no {what} {value!r}: choose {', '.join(choices)}.")


def _check_sandbox(kind: str | None) -> str | None:
    if kind is not None:
        require_choice("sandbox", kind, ("auto", "docker", "bubblewrap", "process"))
    return kind


Db = Annotated[
    str | None, typer.Option("--db", help="Database: a file, sqlite:///FILE or postgresql://...", show_default=False)
]
Url = Annotated[
    str | None,
    typer.Option("--url", help="Server to talk to (or POLAR_URL). Default: use the database.", show_default=False),
]
ServerUrl = Annotated[
    str | None,
    typer.Option("--url", help="Server to point the agent at (or POLAR_URL). Default: this machine's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Engine = Annotated[
    str | None,
    typer.Option("--engine", help="local, vllm, llamacpp, openai, anthropic, google, passthrough, or module:Class."),
]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        "--engine-url", help="URL of the engine. Default for openai, anthropic and google: the provider's own API."
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", help="local: a folder of weights; others: name of the served model.")
]
PromptMode = Annotated[
    str | None,
    typer.Option(
        help="continue: begin each prompt with the exact tokens of the last turn; render: render all messages for each "
        "prompt.",
        show_default=False,
    ),
]
Hooks = Annotated[
    str | None,
    typer.Option(
        "--hooks", metavar="MODULE:CLASS", help="Your class that changes requests or answers (setting gateway.hooks)."
    ),
]
PastReasoning = Annotated[
    str | None,
    typer.Option(
        help="keep: continued prompts keep the reasoning of earlier turns; strip: all messages are rendered again if "
        "the chat template drops reasoning of earlier turns.",
        show_default=False,
    ),
]
Sandbox = Annotated[str, typer.Option(help="auto, docker, bubblewrap or process.", callback=_check_sandbox)]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        metavar="MODULE:NAME",
        help="Allow tasks and requests to use this Python code, in addition to the setting allowed_code. Repeatable.",
    ),
]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="CONDITIONS", help="Only rollouts that match, such as 'reward>=1, harness=codex'."),
]
Sessions = Annotated[list[str] | None, typer.Option("--session", help="Only this session. Repeatable.")]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="First instance of a task family, or first task (from 0) of a file or folder. Without --instances: run "
        "only this instance or task.",
    ),
]
Instances = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Run N tasks, from --seed on. Default: all tasks of a file or folder, or one instance of a task family.",
    ),
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Maximum number of rollouts that run at a time.")]
LogLevel = Annotated[
    str | None,
    typer.Option(help="Lowest level that is logged: debug, info, warning or error.", show_default=False),
]
LogFormat = Annotated[
    str | None,
    typer.Option(help="text: log lines for people; json: one JSON object per line.", show_default=False),
]
PauseFor = Annotated[float | None, typer.Option("--for", help="Resume automatically after N seconds.")]


def model_options(
    model: type[BaseModel], *, exclude: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command one option for each field of `model`.

    The decorated function has a parameter `rollout_options`: a dict of the options that the user gave. Their values
    are not validated here.
    """
    fields = {name: field for name, field in model.model_fields.items() if name not in exclude}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapper(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in fields}
            command(**arguments, rollout_options={name: value for name, value in given.items() if value is not None})

        texts = field_descriptions(model)
        parameters = []
        for name, own in inspect.signature(command, eval_str=True).parameters.items():
            if name == "rollout_options":
                parameters += [_option(field_name, field, texts[field_name]) for field_name, field in fields.items()]
            else:
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
        return wrapper

    return decorate


def _option(name: str, field: FieldInfo, text: str) -> inspect.Parameter:
    minimum: Any = next((limit.ge for limit in field.metadata if isinstance(limit, Ge)), None)
    members = [member for member in get_args(field.annotation) if member is not NoneType]
    value_type: Any = members[0] if NoneType in get_args(field.annotation) else field.annotation
    panel = "Budget of each session" if name in SessionBudget.model_fields else None
    option = typer.Option(help=text, min=minimum, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[value_type | None, option]
    )
