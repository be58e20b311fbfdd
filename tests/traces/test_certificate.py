"""What a certificate tells of a trace, by hand; its schema; its short form in the store."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from polar_proxy.traces import CertificateError, build, certificates, expand, merged, per_call, rescore, stored, tree
from polar_proxy.traces.schema import certificate_schema, violations
from polar_proxy.types import CallRecord, Json
from tests.traces.calls import call
from tests.traces.conversations import END, INFO
from tests.traces.test_canonical import DRIFTED, FIRST, _Teacher


def one(*calls: CallRecord, on_drift: str = "split") -> Json:
    (certificate,) = certificates(calls, build(calls, on_drift=on_drift)).values()
    return certificate


SECOND = call(
    "b",
    1,
    [1, END, 7, 2, 3, END, 4],
    [5],
    engine=INFO,
    base_call_id="a",
    base_choice=0,
    prompt_mode="continue",
    sampling={"temperature": 1.0, "past_reasoning": "keep"},
    weight_version="3",
)


def test_what_is_told() -> None:
    told = one(FIRST, SECOND)
    assert (told["schema"], told["builder"], told["on_drift"], told["session_id"]) == (1, "merged", "split", "sess_1")
    assert (told["grade"], told["why"]) == ("spliced", ["continued"])
    assert (told["parent_trace_id"], told["branch_at"], told["branch_hash"], told["prompt_length"]) == (
        None,
        0,
        None,
        3,
    )
    assert told["engines"] == [
        {"engine": "scripted", "version": "1", "model": "m", "template_hash": "t", "logprob_mode": "processed"}
    ]
    assert (told["rescored"], told["drift"], told["audit"]) == (None, [], None)
    kinds = [(span["kind"], span["call_id"], span["start"], span["end"], span["n"]) for span in told["spans"]]
    assert kinds == [
        ("context", "a", 0, 3, 3),
        ("sampled", "a", 0, 3, 3),
        ("context", "b", 6, 7, 1),
        ("sampled", "b", 0, 1, 1),
    ]
    assert [span["prompt_mode"] for span in told["spans"]] == ["render"] * 2 + ["continue"] * 2
    first, last = told["spans"][1], told["spans"][3]
    assert (first["versions"], first["past_reasoning"], first["sampling"]) == ([[0, None]], None, None)
    assert (last["versions"], last["past_reasoning"], last["engine"]) == ([[0, "3"]], "keep", 0)
    assert told["head"] == last["hash"]
    assert len({span["hash"] for span in told["spans"]} | {told["seed"]}) == 5


def test_the_chain_as_the_docs_say() -> None:
    """Made anew from docs/certificate.md, with nothing of Polar."""

    def chained(before: bytes, told: Json | bytes, *data: bytes) -> bytes:
        text = told if isinstance(told, bytes) else json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
        framed = struct.pack("<I", len(text)) + text
        return hashlib.blake2b(before + framed + b"".join(data), digest_size=16, person=b"polar trace").digest()

    made = merged([FIRST, SECOND])
    (trace,) = made.traces
    (told,) = certificates([FIRST, SECOND], made).values()
    uncovered = ("grade", "audit", "seed", "spans", "head")
    link = chained(b"", {name: value for name, value in told.items() if name not in uncovered})
    assert link.hex() == told["seed"]
    position = 0
    for span in told["spans"]:
        here = slice(position, position + span["n"])
        position = here.stop
        said = struct.pack(f"<{span['n']}f", *trace.logprobs[here]) if span["kind"] == "sampled" else b""
        identity = {name: value for name, value in span.items() if name != "hash"}
        link = chained(link, identity, struct.pack(f"<{span['n']}i", *trace.token_ids[here]), said)
        assert link.hex() == span["hash"]
    assert link.hex() == told["head"]
    calls = [call("a", 0, [1, 2], [3]), call("b", 1, [1, 2, 4], [5])]
    branch = list(certificates(calls, tree(calls)).values())[1]
    assert chained(b"", struct.pack("<2i", 1, 2)).hex() == branch["branch_hash"]


def test_the_policy_versions_of_an_answer() -> None:
    changed = replace(FIRST, weight_version="4")
    choice = replace(changed.choices[0], versions=((0, "3"), (2, "4")))
    told = one(replace(changed, choices=(choice,)))
    assert told["spans"][1]["versions"] == [[0, "3"], [2, "4"]]
    assert told["grade"] == "exact"
    late = replace(changed.choices[0], versions=((2, "5"),))
    assert one(replace(changed, choices=(late,)))["spans"][1]["versions"] == [[0, "4"], [2, "5"]]


def test_weights_that_changed_where_nobody_knows() -> None:
    told = one(replace(FIRST, weight_version="3..4"))
    assert told["spans"][1]["versions"] == [[0, "3..4"]]
    assert (told["grade"], told["why"]) == ("marked", ["weights_changed"])


def test_the_sampling_is_told_where_it_matters() -> None:
    sampling = {"temperature": 0.5, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "seed": 1 << 70, "stop": ["\ud83d"]}
    told = one(replace(FIRST, logprob_mode="raw", sampling=sampling))
    assert told["spans"][1]["sampling"] == {"temperature": 0.5, "top_k": 20}
    assert (told["grade"], told["why"]) == ("marked", ["warped"])


def test_two_engines() -> None:
    other = replace(SECOND, engine=replace(INFO, version="2"))
    told = one(FIRST, other)
    assert [engine["version"] for engine in told["engines"]] == ["1", "2"]
    assert [span.get("engine") for span in told["spans"]] == [None, 0, None, 1]


def test_drift_is_told_where_it_concerns() -> None:
    split = certificates([FIRST, DRIFTED], merged([FIRST, DRIFTED]))
    assert [[found["call_id"] for found in told["drift"]] for told in split.values()] == [[], ["b"]]
    joined = one(FIRST, DRIFTED, on_drift="canonical")
    (found,) = joined["drift"]
    assert found == {
        "call_id": "b",
        "base_call_id": "a",
        "base_choice": 0,
        "position": 3,
        "expected": 2,
        "actual": 23,
        "prompt_reason": "off",
        "outcome": "canonical",
        "split_reason": None,
    }
    assert (joined["on_drift"], joined["grade"], joined["why"]) == ("canonical", "marked", ["canonical"])


async def test_who_rescored_is_told() -> None:
    built = await rescore(merged([FIRST, DRIFTED], on_drift="rescore"), _Teacher())
    (told,) = certificates([FIRST, DRIFTED], built).values()
    assert told["rescored"] == {"engine": "scripted", "version": "1", "model": "m", "weight_version": "5"}
    assert told["why"] == ["canonical", "rescored"]


def test_a_branch_tells_what_it_stands_behind() -> None:
    calls = [call("a", 0, [1, 2], [3]), call("b", 1, [1, 2, 4], [5]), call("c", 2, [1, 2, 6], [7])]
    built = tree(calls)
    root, one, other = certificates(calls, built).values()
    assert root["branch_hash"] is None
    assert one["parent_trace_id"] == other["parent_trace_id"] == root["trace_id"]
    assert one["branch_hash"] == other["branch_hash"] != None  # noqa: E711
    deeper = [*calls[:1], call("b", 1, [1, 2, 3, 4], [5], edge="subagent")]
    assert list(certificates(deeper, tree(deeper)).values())[1]["branch_hash"] != one["branch_hash"]


CASES = {
    "merged": ([FIRST, SECOND], "merged", "split"),
    "per_call": ([FIRST, DRIFTED], "per_call", "split"),
    "tree": ([FIRST, DRIFTED], "tree", "split"),
    "canonical": ([FIRST, DRIFTED], "merged", "canonical"),
    "without engine": ([call("a", 0, [1], [2])], "merged", "split"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_certificate_is_as_its_schema_says(name: str) -> None:
    calls, builder, on_drift = CASES[name]
    for told in certificates(calls, build(calls, builder, on_drift=on_drift)).values():
        read = orjson.loads(orjson.dumps(told))
        assert list(violations(read, certificate_schema())) == []
        try:
            import jsonschema
        except ImportError:
            continue
        jsonschema.validate(read, dict(certificate_schema()))


@pytest.mark.parametrize(
    ("hurt", "said"),
    [
        (lambda told: told.pop("head"), "lacks head"),
        (lambda told: told.update(more=1), "has more"),
        (lambda told: told.update(grade="good"), "none of"),
        (lambda told: told.update(branch_at=-1), "below 0"),
        (lambda told: told.update(branch_at=True), "type integer"),
        (lambda told: told.update(seed="xyz"), "form"),
        (lambda told: told.update(spans=[]), "fewer than 1"),
        (lambda told: told["spans"][0].update(kind="guessed"), "spans[0]"),
        (lambda told: told["spans"][1].update(versions=[[0]]), "spans[1]"),
        (lambda told: told["spans"][1].update(versions=[[0, 3]]), "spans[1]"),
        (lambda told: told["engines"][0].update(logprob_mode="cooked"), "engines[0].logprob_mode"),
        (lambda told: told.update(schema="1"), "schema is not 1"),
        (lambda told: told.update(schema=True), "schema is not 1"),
    ],
)
def test_what_is_not_as_the_schema_says(hurt: Any, said: str) -> None:
    told = orjson.loads(orjson.dumps(one(FIRST, SECOND)))
    hurt(told)
    assert any(said in line for line in violations(told, certificate_schema()))


def test_a_keyword_that_is_not_known_is_not_passed_over() -> None:
    with pytest.raises(NotImplementedError):
        list(violations(1, {"multipleOf": 2}))


@pytest.mark.parametrize("name", CASES)
def test_the_short_form_becomes_whole_again(name: str) -> None:
    calls, builder, on_drift = CASES[name]
    built = build(calls, builder, on_drift=on_drift)
    whole = certificates(calls, built)
    short = {trace_id: orjson.loads(orjson.dumps(stored(told))) for trace_id, told in whole.items()}
    assert all(len(orjson.dumps(told)) < len(orjson.dumps(whole[trace_id])) for trace_id, told in short.items())
    assert expand(short, built.traces, calls) == whole


def test_an_audit_is_kept() -> None:
    built = merged([FIRST, SECOND])
    (trace_id,) = built.why
    short = {**stored(certificates([FIRST, SECOND], built)[trace_id]), "grade": "refused", "audit": {"tokens": 4}}
    whole = expand({trace_id: short}, built.traces, [FIRST, SECOND])[trace_id]
    assert (whole["grade"], whole["audit"]) == ("refused", {"tokens": 4})


def test_what_was_built_by_an_earlier_version_gets_its_certificate() -> None:
    calls = [FIRST, DRIFTED]
    for built in (merged(calls), per_call(calls)):
        assert expand({}, built.traces, calls) == certificates(calls, built)


@pytest.mark.parametrize(
    "changed",
    [
        {"weight_version": "9"},
        {"prompt_mode": "render"},
        {"engine": replace(INFO, template_hash="another")},
        {"sampling": {"temperature": 1.0, "past_reasoning": "strip"}},
        {"choices": (replace(SECOND.choices[0], versions=((0, "8"),)),)},
    ],
)
def test_a_call_that_was_changed_since_is_found(changed: dict[str, Any]) -> None:
    built = merged([FIRST, SECOND])
    short = {trace_id: stored(told) for trace_id, told in certificates([FIRST, SECOND], built).items()}
    with pytest.raises(CertificateError, match="polar build sess_1"):
        expand(short, built.traces, [FIRST, replace(SECOND, **changed)])


def test_a_trace_that_was_changed_since_is_found() -> None:
    built = merged([FIRST, SECOND])
    short = {trace_id: stored(told) for trace_id, told in certificates([FIRST, SECOND], built).items()}
    hurt = built.traces[0].logprobs.copy()
    hurt[3] = np.nextafter(hurt[3], np.float32(0))
    with pytest.raises(CertificateError):
        expand(short, [replace(built.traces[0], logprobs=hurt)], [FIRST, SECOND])
