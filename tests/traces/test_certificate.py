"""Certificates of traces by hand, their JSON Schema, and their short form in the store."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from polar_proxy.traces.builders import build
from polar_proxy.traces.certificate import Certificate, CertificateError, certify, restore, stored_form
from polar_proxy.traces.rows import describe_errors
from polar_proxy.traces.scoring import rescore
from polar_proxy.types import CallRecord, Json
from tests.factories import call
from tests.traces.conversations import END, INFO
from tests.traces.test_canonical import DRIFTED, FIRST, PositionScorer


def one(*calls: CallRecord, on_drift: str = "split") -> Json:
    (certificate,) = certify(calls, build(calls, on_drift=on_drift)).values()
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


def test_certificate_of_two_turns() -> None:
    fields = one(FIRST, SECOND)
    assert (fields["schema"], fields["builder"], fields["on_drift"], fields["session_id"]) == (
        2,
        "merged",
        "split",
        "sess_1",
    )
    assert (fields["grade"], fields["grade_reasons"]) == ("continued", ["continued"])
    assert (fields["parent_trace_id"], fields["branch_at"], fields["branch_hash"], fields["prompt_length"]) == (
        None,
        0,
        None,
        3,
    )
    assert fields["engines"] == [
        {
            "engine": "scripted",
            "version": "1",
            "model": "m",
            "template_hash": "t",
            "logprob_mode": "processed",
            "precision": None,
        }
    ]
    assert (fields["rescored"], fields["drift"], fields["audit"]) == (None, [], None)
    kinds = [(span["kind"], span["call_id"], span["start"], span["end"], span["n"]) for span in fields["spans"]]
    assert kinds == [
        ("context", "a", 0, 3, 3),
        ("sampled", "a", 0, 3, 3),
        ("context", "b", 6, 7, 1),
        ("sampled", "b", 0, 1, 1),
    ]
    assert [span["prompt_mode"] for span in fields["spans"]] == ["render"] * 2 + ["continue"] * 2
    first, last = fields["spans"][1], fields["spans"][3]
    assert (first["versions"], first["past_reasoning"], first["temperature"]) == ([[0, None]], None, 1.0)
    assert (last["versions"], last["past_reasoning"], last["engine"]) == ([[0, "3"]], "keep", 0)
    assert fields["head"] == last["hash"]
    assert len({span["hash"] for span in fields["spans"]} | {fields["seed"]}) == 5


def test_hash_chain_is_as_documented() -> None:
    """Compute the hashes as `polar_proxy/traces/certificate.py` describes them, without code of Polar."""

    def chained(before: bytes, value: Json | bytes, *data: bytes) -> bytes:
        text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        framed = struct.pack("<I", len(text)) + text
        return hashlib.blake2b(before + framed + b"".join(data), digest_size=16, person=b"polar trace").digest()

    made = build([FIRST, SECOND])
    (trace,) = made.traces
    (fields,) = certify([FIRST, SECOND], made).values()
    uncovered = ("grade", "audit", "seed", "spans", "head")
    link = chained(b"", {name: value for name, value in fields.items() if name not in uncovered})
    assert link.hex() == fields["seed"]
    position = 0
    for span in fields["spans"]:
        here = slice(position, position + span["n"])
        position = here.stop
        logprobs = struct.pack(f"<{span['n']}f", *trace.logprobs[here]) if span["kind"] == "sampled" else b""
        identity = {name: value for name, value in span.items() if name != "hash"}
        link = chained(link, identity, struct.pack(f"<{span['n']}i", *trace.token_ids[here]), logprobs)
        assert link.hex() == span["hash"]
    assert link.hex() == fields["head"]
    calls = [call("a", 0, [1, 2], [3]), call("b", 1, [1, 2, 4], [5])]
    branch = list(certify(calls, build(calls, "tree")).values())[1]
    assert chained(b"", struct.pack("<2i", 1, 2)).hex() == branch["branch_hash"]


def test_policy_versions_of_an_answer() -> None:
    changed = replace(FIRST, weight_version="4")
    choice = replace(changed.choices[0], versions=((0, "3"), (2, "4")))
    fields = one(replace(changed, choices=(choice,)))
    assert fields["spans"][1]["versions"] == [[0, "3"], [2, "4"]]
    assert fields["grade"] == "exact"
    late = replace(changed.choices[0], versions=((2, "5"),))
    assert one(replace(changed, choices=(late,)))["spans"][1]["versions"] == [[0, "4"], [2, "5"]]


def test_weights_changed_at_an_unknown_token() -> None:
    fields = one(replace(FIRST, weight_version="3..4"))
    assert fields["spans"][1]["versions"] == [[0, "3..4"]]
    assert (fields["grade"], fields["grade_reasons"]) == ("approximate", ["weights_changed"])


def test_distribution_is_certified() -> None:
    sampling = {"temperature": 0.5, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "seed": 1 << 70, "stop": ["\ud83d"]}
    fields = one(replace(FIRST, logprob_mode="raw", sampling=sampling))
    assert (fields["spans"][1]["temperature"], fields["spans"][1]["changes"]) == (0.5, {"top_k": 20})
    assert (fields["grade"], fields["grade_reasons"]) == ("approximate", ["off_distribution"])


def test_spans_name_their_engine() -> None:
    other = replace(SECOND, engine=replace(INFO, version="2"))
    fields = one(FIRST, other)
    assert [engine["version"] for engine in fields["engines"]] == ["1", "2"]
    assert [span.get("engine") for span in fields["spans"]] == [None, 0, None, 1]


def test_certificate_has_the_precision_of_the_engine() -> None:
    fields = one(replace(FIRST, engine=replace(INFO, precision="bfloat16, fp8 cache")))
    assert fields["engines"][0]["precision"] == "bfloat16, fp8 cache"


def test_drift_is_in_the_trace_of_the_drifted_call() -> None:
    split = certify([FIRST, DRIFTED], build([FIRST, DRIFTED]))
    assert [[event["call_id"] for event in certificate["drift"]] for certificate in split.values()] == [[], ["b"]]
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
    assert (joined["on_drift"], joined["grade"], joined["grade_reasons"]) == ("canonical", "approximate", ["canonical"])


async def test_rescored_trace_names_its_scorer() -> None:
    built = await rescore(build([FIRST, DRIFTED], on_drift="rescore"), PositionScorer())
    (fields,) = certify([FIRST, DRIFTED], built).values()
    assert fields["rescored"] == {"engine": "scripted", "version": "1", "model": "m", "weight_version": "5"}
    assert fields["grade_reasons"] == ["canonical", "rescored"]


def test_branch_has_the_hash_of_the_tokens_before_it() -> None:
    calls = [call("a", 0, [1, 2], [3]), call("b", 1, [1, 2, 4], [5]), call("c", 2, [1, 2, 6], [7])]
    built = build(calls, "tree")
    root, one, other = certify(calls, built).values()
    assert root["branch_hash"] is None
    assert one["parent_trace_id"] == other["parent_trace_id"] == root["trace_id"]
    assert one["branch_hash"] == other["branch_hash"] != None  # noqa: E711
    deeper = [*calls[:1], call("b", 1, [1, 2, 3, 4], [5], edge="subagent")]
    assert list(certify(deeper, build(deeper, "tree")).values())[1]["branch_hash"] != one["branch_hash"]


CASES = {
    "merged": ([FIRST, SECOND], "merged", "split"),
    "per_call": ([FIRST, DRIFTED], "per_call", "split"),
    "tree": ([FIRST, DRIFTED], "tree", "split"),
    "canonical": ([FIRST, DRIFTED], "merged", "canonical"),
    "without engine": ([call("a", 0, [1], [2])], "merged", "split"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_certificate_is_valid_by_its_json_schema(name: str) -> None:
    calls, builder, on_drift = CASES[name]
    for certificate in certify(calls, build(calls, builder, on_drift=on_drift)).values():
        read = orjson.loads(orjson.dumps(certificate))
        assert read == certificate
        assert orjson.loads(Certificate.model_validate(read).model_dump_json(by_alias=True)) == certificate
        try:
            import jsonschema
        except ImportError:
            continue
        jsonschema.validate(read, Certificate.model_json_schema())


@pytest.mark.parametrize(
    ("damage", "field", "expected"),
    [
        (lambda fields: fields.pop("head"), "head", "required"),
        (lambda fields: fields.update(more=1), "more", "not permitted"),
        (lambda fields: fields.update(grade="good"), "grade", "'exact', 'continued', 'approximate' or 'rejected'"),
        (lambda fields: fields.update(branch_at=-1), "branch_at", "greater than or equal to 0"),
        (lambda fields: fields.update(branch_at=True), "branch_at", "valid integer"),
        (lambda fields: fields.update(seed="xyz"), "seed", "pattern"),
        (lambda fields: fields.update(spans=[]), "spans", "at least 1 item"),
        (lambda fields: fields["spans"][0].update(kind="guessed"), "spans[0]", "'context', 'sampled'"),
        (lambda fields: fields["spans"][1].update(versions=[[0]]), "spans[1].sampled.versions[0][1]", "required"),
        (lambda fields: fields["spans"][1].update(versions=[[0, 3]]), "spans[1].sampled.versions[0][1]", "string"),
        (lambda fields: fields["engines"][0].update(logprob_mode="cooked"), "engines[0].logprob_mode", "'raw'"),
        (lambda fields: fields.update(schema="1"), "schema", "valid integer"),
        (lambda fields: fields.update(schema=True), "schema", "valid integer"),
    ],
)
def test_invalid_field_is_reported_with_its_path(damage: Any, field: str, expected: str) -> None:
    fields = orjson.loads(orjson.dumps(one(FIRST, SECOND)))
    damage(fields)
    with pytest.raises(ValidationError) as caught:
        Certificate.model_validate(fields)
    (line,) = describe_errors(caught.value)
    assert line.startswith(f"{field}: ")
    assert expected in line


@pytest.mark.parametrize("name", CASES)
def test_stored_form_is_restored_whole(name: str) -> None:
    calls, builder, on_drift = CASES[name]
    built = build(calls, builder, on_drift=on_drift)
    whole = certify(calls, built)
    short = {trace_id: orjson.dumps(stored_form(certificate)) for trace_id, certificate in whole.items()}
    assert all(len(text) < len(orjson.dumps(whole[trace_id])) for trace_id, text in short.items())
    assert restore({trace_id: orjson.loads(text) for trace_id, text in short.items()}, built.traces, calls) == whole


def test_audit_is_restored() -> None:
    built = build([FIRST, SECOND])
    (trace_id,) = built.grade_reasons
    short = {**stored_form(certify([FIRST, SECOND], built)[trace_id]), "grade": "rejected", "audit": {"tokens": 4}}
    whole = restore({trace_id: short}, built.traces, [FIRST, SECOND])[trace_id]
    assert (whole["grade"], whole["audit"]) == ("rejected", {"tokens": 4})


def test_trace_without_a_certificate_is_not_restored() -> None:
    built = build([FIRST, SECOND])
    with pytest.raises(CertificateError, match="polar build sess_1"):
        restore({built.traces[0].trace_id: None}, built.traces, [FIRST, SECOND])


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
def test_detects_a_call_changed_since_the_build(changed: dict[str, Any]) -> None:
    built = build([FIRST, SECOND])
    short = {trace_id: stored_form(one) for trace_id, one in certify([FIRST, SECOND], built).items()}
    with pytest.raises(CertificateError, match="polar build sess_1"):
        restore(short, built.traces, [FIRST, replace(SECOND, **changed)])


def test_detects_a_trace_changed_since_the_build() -> None:
    built = build([FIRST, SECOND])
    short = {trace_id: stored_form(one) for trace_id, one in certify([FIRST, SECOND], built).items()}
    changed = built.traces[0].logprobs.copy()
    changed[3] = np.nextafter(changed[3], np.float32(0))
    with pytest.raises(CertificateError):
        restore(short, [replace(built.traces[0], logprobs=changed)], [FIRST, SECOND])
