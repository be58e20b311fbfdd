"""`polar reward` and `polar remark`: what a person or a program thinks of a rollout or a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import make_request, with_client
from polar_proxy.cli.output import print_result
from polar_proxy.errors import UsageError
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.api_models import Remark
    from polar_proxy.client import AsyncClient

Target = Annotated[
    str, typer.Argument(metavar="ROLLOUT|SESSION", help="Id of a rollout, or of a session without a rollout.")
]


def reward(
    target: Target,
    value: Annotated[str, typer.Argument(help="A number, or `none` if the work could not be judged.")],
    source: Annotated[str, typer.Option(help="Source of the reward, such as human:anna or ci.")],
    call: Annotated[str | None, typer.Option(help="Reward only this call.")] = None,
    trace: Annotated[str | None, typer.Option(help="Reward only this trace.")] = None,
    detail: Annotated[str | None, typer.Option(help="A JSON object to store with the reward.")] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Add a reward to a rollout or a session. Earlier rewards are kept.

    The reward of a rollout or session is the newest reward that is for the whole rollout or session. Rewards of single
    calls and traces do not change it.
    """
    from polar_proxy.api_models import RewardRequest

    try:
        number = None if value == "none" else float(value)
        details = {} if detail is None else orjson.loads(detail)
    except ValueError as error:  # includes JSONDecodeError
        raise UsageError(f"VALUE must be a number or `none`, and --detail must be a JSON object: {error}.") from error
    request = make_request(
        RewardRequest,
        **_target(target),
        value=number,
        source=source,
        call_id=call,
        trace_id=trace,
        detail=details,
    )
    stored = with_client(url, db, lambda client: client.reward(request))
    print_result(stored, stored.reward_id, as_json)


def remark(
    target: Target,
    label: Annotated[str | None, typer.Option(help="A word to select by: `--where label=WORD`.")] = None,
    note: Annotated[str | None, typer.Option(help="A text of any length.")] = None,
    rating: Annotated[float | None, typer.Option(help="A number from 1 to 5.")] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Give a label, a note or a rating to a rollout or a session. Earlier remarks are kept.

    The author is the API key, or this machine if the command opens the database itself.
    """
    from polar_proxy.api_models import RemarkRequest

    texts: dict[str, Json] = {"label": {"text": label}, "note": {"text": note}, "rating": {"value": rating}}
    remarks = {kind: value for kind, value in texts.items() if None not in value.values()}
    if not remarks:
        raise UsageError("Give --label, --note or --rating.")
    requests = [make_request(RemarkRequest, **_target(target), kind=kind, **value) for kind, value in remarks.items()]

    async def give(client: AsyncClient) -> list[Remark]:
        return [await client.remark(request) for request in requests]

    stored = with_client(url, db, give)
    print_result(stored, "\n".join(one.remark_id for one in stored), as_json)


def _target(name: str) -> Json:
    return {"session_id" if name.startswith("sess_") else "rollout_id": name}
