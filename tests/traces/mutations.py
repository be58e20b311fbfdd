"""Mutations of exported rows, each of which the checker must detect.

A mutation changes rows in place, at positions that `random` chooses, and returns whether it changed anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from polar_proxy.types import Json

Mutation = Callable[[list[Json], Random], bool]


def _any_row(rows: list[Json], random: Random) -> Json:
    return random.choice(rows)


def _spans(row: Json, random: Random, kind: str | None = None) -> list[int]:
    found = [position for position, span in enumerate(row["spans"]) if kind is None or span["kind"] == kind]
    random.shuffle(found)
    return found


def token(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    name = random.choice([name for name in ("prompt_ids", "response_ids") if row[name]])
    position = random.randrange(len(row[name]))
    row[name][position] ^= 1 << random.randrange(20)
    return True


def two_tokens_swapped(rows: list[Json], random: Random) -> bool:
    ids = _any_row(rows, random)["response_ids"]
    one, other = random.randrange(len(ids)), random.randrange(len(ids))
    ids[one], ids[other] = ids[other], ids[one]
    return bool(ids[one] != ids[other])


def mask_bit(rows: list[Json], random: Random) -> bool:
    mask = _any_row(rows, random)["loss_mask"]
    mask[random.randrange(len(mask))] ^= 1
    return True


def mask_and_logprob_moved(rows: list[Json], random: Random) -> bool:
    """Switch off a sampled position together with its log-probability."""
    row = _any_row(rows, random)
    position = random.choice([position for position, one in enumerate(row["loss_mask"]) if one])
    row["loss_mask"][position], row["logprobs"][position] = 0, None
    return True


def logprob(rows: list[Json], random: Random) -> bool:
    """Change a log-probability by the smallest step of a float32."""
    row = _any_row(rows, random)
    position = random.choice([position for position, one in enumerate(row["logprobs"]) if one is not None])
    row["logprobs"][position] = float(np.nextafter(np.float32(row["logprobs"][position]), np.float32(1)))
    return True


def two_logprobs_swapped(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    positions = [position for position, one in enumerate(row["logprobs"]) if one is not None]
    one, other = random.choice(positions), random.choice(positions)
    values = row["logprobs"]
    values[one], values[other] = values[other], values[one]
    return bool(values[one] != values[other])


def no_logprob(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    position = random.choice([position for position, one in enumerate(row["logprobs"]) if one is not None])
    row["logprobs"][position] = random.choice([None, 0.0, -9999.0, "nan", True])
    return True


def logprob_of_context(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    positions = [position for position, one in enumerate(row["logprobs"]) if one is None]
    if positions:
        row["logprobs"][random.choice(positions)] = -0.5
    return bool(positions)


def truncated(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    names = random.choice([["response_ids"], ["loss_mask"], ["logprobs"], ["response_ids", "loss_mask", "logprobs"]])
    for name in names:
        row[name].pop()
    return True


def padded(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    for name, value in (("response_ids", 0), ("loss_mask", 0), ("logprobs", None)):
        row[name].append(value)
    return True


def prompt_border_moved(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    if not row["prompt_ids"]:
        return False
    row["response_ids"].insert(0, row["prompt_ids"].pop())
    row["loss_mask"].insert(0, 0)
    row["logprobs"].insert(0, None)
    return True


def _both(row: Json, change: Callable[[list[Any]], object]) -> None:
    """Make the same change to the spans of the row and of its certificate."""
    change(row["spans"])
    change(row["certificate"]["spans"])


def span_dropped(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    position = random.randrange(len(row["spans"]))
    _both(row, lambda spans: spans.pop(position))
    return True


def span_dropped_with_its_tokens(rows: list[Json], random: Random) -> bool:
    """Drop a span with its tokens: the other spans still tile the row."""
    row = _any_row(rows, random)
    before = 0
    for position, span in enumerate(row["certificate"]["spans"]):
        if position and before >= len(row["prompt_ids"]) and random.random() < 0.5:
            start = before - len(row["prompt_ids"])
            for name in ("response_ids", "loss_mask", "logprobs"):
                del row[name][start : start + span["n"]]
            _both(row, lambda spans, position=position: spans.pop(position))  # type: ignore[misc]
            return True
        before += span["n"]
    return False


def span_doubled(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    position = random.randrange(len(row["spans"]))
    _both(row, lambda spans: spans.insert(position, copy.deepcopy(spans[position])))
    return True


def spans_reordered(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    if len(row["spans"]) < 2:
        return False
    position = random.randrange(len(row["spans"]) - 1)
    _both(row, lambda spans: spans.insert(position, spans.pop(position + 1)))
    return True


def spans_of_the_row_alone(rows: list[Json], random: Random) -> bool:
    span = random.choice(_any_row(rows, random)["spans"])
    name = random.choice(["kind", "call_id", "choice", "start", "end"])
    span[name] = {"kind": "prompt", "call_id": "call_x"}.get(name, 77)
    return True


def offsets(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    position, by = random.randrange(len(row["spans"])), random.choice([-1, 1, 2])
    spans = row["certificate"]["spans"]
    spans[position]["start"] += by
    spans[position]["end"] += by
    row["spans"][position].update(start=spans[position]["start"], end=spans[position]["end"])
    return True


def border_between_spans(rows: list[Json], random: Random) -> bool:
    """Move a token from one span to the next."""
    row = _any_row(rows, random)
    if len(row["spans"]) < 2:
        return False
    position = random.randrange(len(row["spans"]) - 1)
    one, other = row["certificate"]["spans"][position : position + 2]
    one["end"], one["n"], other["n"], other["end"] = one["end"] - 1, one["n"] - 1, other["n"] + 1, other["end"] + 1
    for spans in (position, position + 1):
        fields = row["certificate"]["spans"][spans]
        row["spans"][spans].update(start=fields["start"], end=fields["end"])
    return True


def kind_of_span(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    position = random.randrange(len(row["spans"]))
    other = {"context": "sampled", "sampled": "context"}[row["spans"][position]["kind"]]
    _both(row, lambda spans: spans[position].update(kind=other))
    return True


def call_of_span(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    position = random.randrange(len(row["spans"]))
    _both(row, lambda spans: spans[position].update(call_id="call_x"))
    return True


def policy_version(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    position = _spans(row, random, "sampled")[0]
    row["certificate"]["spans"][position]["versions"][0][1] = "99"
    return True


def prompt_mode(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    span = random.choice(row["certificate"]["spans"])
    span["prompt_mode"] = {"render": "continue", "continue": "render"}[span["prompt_mode"]]
    return True


def grade(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    other = random.choice([one for one in ("exact", "continued", "approximate", "rejected") if one != row["grade"]])
    row["grade"] = row["certificate"]["grade"] = other
    return True


def grade_and_reasons(rows: list[Json], random: Random) -> bool:
    """Make a continued or approximate row exact."""
    row = _any_row(rows, random)
    was = row["grade"]
    row["grade"] = row["certificate"]["grade"] = "exact"
    row["certificate"]["grade_reasons"] = []
    return bool(was != "exact")


def header(rows: list[Json], random: Random) -> bool:
    fields = _any_row(rows, random)["certificate"]
    change: Any = random.choice(
        [
            {"on_drift": None if fields["on_drift"] else "split"},
            {"rollout_id": "roll_x"},
            {"branch_at": fields["branch_at"] + 1},
            {"branch_hash": "0" * 32},
            {"prompt_length": fields["prompt_length"] + 1},
            {"engines": []},
            {"rescored": {"engine": "e", "version": "1", "model": "m", "weight_version": None}},
            {"trace_id": "trc_x"},
            {"builder": "rescored"},
            {"schema": 2},
            {"seed": "0" * 32},
            {"head": "0" * 32},
        ]
    )
    fields.update(change)
    return True


def engine(rows: list[Json], random: Random) -> bool:
    fields = random.choice(_any_row(rows, random)["certificate"]["engines"])
    fields[random.choice(["version", "model", "template_hash"])] = "another"
    return True


def finding(rows: list[Json], random: Random) -> bool:
    fields = _any_row(rows, random)["certificate"]
    if fields["drift"]:
        random.choice(fields["drift"])["position"] += 1
    else:
        fields["drift"].append(
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
    span = random.choice(_any_row(rows, random)["certificate"]["spans"])
    span["hash"] = ("1" if span["hash"][0] == "0" else "0") + span["hash"][1:]
    return True


def certificates_swapped(rows: list[Json], random: Random) -> bool:
    if len(rows) < 2:
        return False
    one, other = random.sample(rows, 2)
    one["certificate"], other["certificate"] = other["certificate"], one["certificate"]
    return True


def certificate_lost(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    if random.random() < 0.5:
        del row["certificate"]
    else:
        row["certificate"] = None
    return True


def field_lost(rows: list[Json], random: Random) -> bool:
    row = _any_row(rows, random)
    target = random.choice([row, row["certificate"], random.choice(row["certificate"]["spans"])])
    needed = [*("prompt_ids", "response_ids", "loss_mask", "logprobs", "spans", "trace_id", "builder", "grade")]
    del target[random.choice(needed if target is row else sorted(target))]
    return True


def row_doubled(rows: list[Json], random: Random) -> bool:
    rows.append(copy.deepcopy(_any_row(rows, random)))
    return True


def parent_lost(rows: list[Json], random: Random) -> bool:
    parents = {row.get("parent_trace_id") for row in rows} - {None}
    for row in rows:
        if row["trace_id"] in parents:
            rows.remove(row)
            return True
    return False


MUTATIONS: dict[str, Mutation] = {
    name: value
    for name, value in dict(globals()).items()
    if callable(value) and getattr(value, "__module__", "") == __name__ and not name.startswith("_")
}
