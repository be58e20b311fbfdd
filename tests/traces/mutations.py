"""Ways in which an exported row can be hurt. docs/guide/data.md lists them; each must be caught.

A wound changes rows in place and returns whether it could; what it takes is drawn from `random`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from polar_proxy.types import Json

Wound = Callable[[list[Json], Random], bool]


def _one(rows: list[Json], random: Random) -> Json:
    return random.choice(rows)


def _spans(row: Json, random: Random, kind: str | None = None) -> list[int]:
    found = [place for place, span in enumerate(row["spans"]) if kind is None or span["kind"] == kind]
    random.shuffle(found)
    return found


def token(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    name = random.choice([name for name in ("prompt_ids", "response_ids") if row[name]])
    place = random.randrange(len(row[name]))
    row[name][place] ^= 1 << random.randrange(20)
    return True


def two_tokens_swapped(rows: list[Json], random: Random) -> bool:
    ids = _one(rows, random)["response_ids"]
    one, other = random.randrange(len(ids)), random.randrange(len(ids))
    ids[one], ids[other] = ids[other], ids[one]
    return bool(ids[one] != ids[other])


def mask_bit(rows: list[Json], random: Random) -> bool:
    mask = _one(rows, random)["loss_mask"]
    mask[random.randrange(len(mask))] ^= 1
    return True


def mask_and_logprob_moved(rows: list[Json], random: Random) -> bool:
    """A sampled position is switched off together with its log-probability."""
    row = _one(rows, random)
    place = random.choice([place for place, one in enumerate(row["loss_mask"]) if one])
    row["loss_mask"][place], row["logprobs"][place] = 0, None
    return True


def logprob(rows: list[Json], random: Random) -> bool:
    """By the smallest step that a float32 can make."""
    row = _one(rows, random)
    place = random.choice([place for place, one in enumerate(row["logprobs"]) if one is not None])
    row["logprobs"][place] = float(np.nextafter(np.float32(row["logprobs"][place]), np.float32(1)))
    return True


def two_logprobs_swapped(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    places = [place for place, one in enumerate(row["logprobs"]) if one is not None]
    one, other = random.choice(places), random.choice(places)
    values = row["logprobs"]
    values[one], values[other] = values[other], values[one]
    return bool(values[one] != values[other])


def no_logprob(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place = random.choice([place for place, one in enumerate(row["logprobs"]) if one is not None])
    row["logprobs"][place] = random.choice([None, 0.0, -9999.0, "nan", True])
    return True


def logprob_of_context(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    places = [place for place, one in enumerate(row["logprobs"]) if one is None]
    if places:
        row["logprobs"][random.choice(places)] = -0.5
    return bool(places)


def truncated(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    names = random.choice([["response_ids"], ["loss_mask"], ["logprobs"], ["response_ids", "loss_mask", "logprobs"]])
    for name in names:
        row[name].pop()
    return True


def padded(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    for name, value in (("response_ids", 0), ("loss_mask", 0), ("logprobs", None)):
        row[name].append(value)
    return True


def prompt_border_moved(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    if not row["prompt_ids"]:
        return False
    row["response_ids"].insert(0, row["prompt_ids"].pop())
    row["loss_mask"].insert(0, 0)
    row["logprobs"].insert(0, None)
    return True


def _both(row: Json, change: Callable[[list[Any]], object]) -> None:
    """The same to the spans of the row and to those of its certificate."""
    change(row["spans"])
    change(row["certificate"]["spans"])


def span_dropped(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place = random.randrange(len(row["spans"]))
    _both(row, lambda spans: spans.pop(place))
    return True


def span_dropped_with_its_tokens(rows: list[Json], random: Random) -> bool:
    """All of an answer and of what stands before it: what is left tiles the row."""
    row = _one(rows, random)
    before = 0
    for place, span in enumerate(row["certificate"]["spans"]):
        if place and before >= len(row["prompt_ids"]) and random.random() < 0.5:
            start = before - len(row["prompt_ids"])
            for name in ("response_ids", "loss_mask", "logprobs"):
                del row[name][start : start + span["n"]]
            _both(row, lambda spans, place=place: spans.pop(place))  # type: ignore[misc]
            return True
        before += span["n"]
    return False


def span_doubled(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place = random.randrange(len(row["spans"]))
    _both(row, lambda spans: spans.insert(place, copy.deepcopy(spans[place])))
    return True


def spans_reordered(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    if len(row["spans"]) < 2:
        return False
    place = random.randrange(len(row["spans"]) - 1)
    _both(row, lambda spans: spans.insert(place, spans.pop(place + 1)))
    return True


def spans_of_the_row_alone(rows: list[Json], random: Random) -> bool:
    span = random.choice(_one(rows, random)["spans"])
    name = random.choice(["kind", "call_id", "choice", "start", "end"])
    span[name] = {"kind": "prompt", "call_id": "call_x"}.get(name, 77)
    return True


def offsets(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place, by = random.randrange(len(row["spans"])), random.choice([-1, 1, 2])
    spans = row["certificate"]["spans"]
    spans[place]["start"] += by
    spans[place]["end"] += by
    row["spans"][place].update(start=spans[place]["start"], end=spans[place]["end"])
    return True


def border_between_spans(rows: list[Json], random: Random) -> bool:
    """The first gives a token to the second."""
    row = _one(rows, random)
    if len(row["spans"]) < 2:
        return False
    place = random.randrange(len(row["spans"]) - 1)
    one, other = row["certificate"]["spans"][place : place + 2]
    one["end"], one["n"], other["n"], other["end"] = one["end"] - 1, one["n"] - 1, other["n"] + 1, other["end"] + 1
    for spans in (place, place + 1):
        told = row["certificate"]["spans"][spans]
        row["spans"][spans].update(start=told["start"], end=told["end"])
    return True


def kind_of_span(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place = random.randrange(len(row["spans"]))
    other = {"context": "sampled", "sampled": "context"}[row["spans"][place]["kind"]]
    _both(row, lambda spans: spans[place].update(kind=other))
    return True


def call_of_span(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place = random.randrange(len(row["spans"]))
    _both(row, lambda spans: spans[place].update(call_id="call_x"))
    return True


def policy_version(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place = _spans(row, random, "sampled")[0]
    row["certificate"]["spans"][place]["versions"][0][1] = "99"
    return True


def prompt_mode(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    span = random.choice(row["certificate"]["spans"])
    span["prompt_mode"] = {"render": "continue", "continue": "render"}[span["prompt_mode"]]
    return True


def grade(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    other = random.choice([one for one in ("exact", "continued", "approximate", "rejected") if one != row["grade"]])
    row["grade"] = row["certificate"]["grade"] = other
    return True


def grade_and_reasons(rows: list[Json], random: Random) -> bool:
    """A continued or approximate row made an exact one."""
    row = _one(rows, random)
    was = row["grade"]
    row["grade"] = row["certificate"]["grade"] = "exact"
    row["certificate"]["reasons"] = []
    return bool(was != "exact")


def header(rows: list[Json], random: Random) -> bool:
    told = _one(rows, random)["certificate"]
    change: Any = random.choice(
        [
            {"on_drift": None if told["on_drift"] else "split"},
            {"rollout_id": "roll_x"},
            {"branch_at": told["branch_at"] + 1},
            {"branch_hash": "0" * 32},
            {"prompt_length": told["prompt_length"] + 1},
            {"engines": []},
            {"rescored": {"engine": "e", "version": "1", "model": "m", "weight_version": None}},
            {"trace_id": "trc_x"},
            {"builder": "rescored"},
            {"schema": 2},
            {"seed": "0" * 32},
            {"head": "0" * 32},
        ]
    )
    told.update(change)
    return True


def engine(rows: list[Json], random: Random) -> bool:
    told = random.choice(_one(rows, random)["certificate"]["engines"])
    told[random.choice(["version", "model", "template_hash"])] = "another"
    return True


def finding(rows: list[Json], random: Random) -> bool:
    told = _one(rows, random)["certificate"]
    if told["drift"]:
        random.choice(told["drift"])["position"] += 1
    else:
        told["drift"].append(
            {
                "call_id": "call_x",
                "base_call_id": "call_y",
                "base_choice": 0,
                "position": 0,
                "expected": 1,
                "actual": 2,
                "prompt_reason": None,
                "outcome": "split",
                "split_reason": None,
            }
        )
    return True


def link(rows: list[Json], random: Random) -> bool:
    span = random.choice(_one(rows, random)["certificate"]["spans"])
    span["hash"] = ("1" if span["hash"][0] == "0" else "0") + span["hash"][1:]
    return True


def certificates_swapped(rows: list[Json], random: Random) -> bool:
    if len(rows) < 2:
        return False
    one, other = random.sample(rows, 2)
    one["certificate"], other["certificate"] = other["certificate"], one["certificate"]
    return True


def certificate_lost(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    if random.random() < 0.5:
        del row["certificate"]
    else:
        row["certificate"] = None
    return True


def field_lost(rows: list[Json], random: Random) -> bool:
    row = _one(rows, random)
    place = random.choice([row, row["certificate"], random.choice(row["certificate"]["spans"])])
    needed = [*("prompt_ids", "response_ids", "loss_mask", "logprobs", "spans", "trace_id", "builder", "grade")]
    del place[random.choice(needed if place is row else sorted(place))]
    return True


def row_doubled(rows: list[Json], random: Random) -> bool:
    rows.append(copy.deepcopy(_one(rows, random)))
    return True


def parent_lost(rows: list[Json], random: Random) -> bool:
    parents = {row.get("parent_trace_id") for row in rows} - {None}
    for row in rows:
        if row["trace_id"] in parents:
            rows.remove(row)
            return True
    return False


WOUNDS: dict[str, Wound] = {
    name: value
    for name, value in dict(globals()).items()
    if callable(value) and getattr(value, "__module__", "") == __name__ and not name.startswith("_")
}
