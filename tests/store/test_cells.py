"""Packed cells: unpacking returns exactly what was packed, and unknown cells are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from polar_proxy.errors import StoreError
from polar_proxy.store.encoding.cells import CONTEXT, CellCodec, bytes_before
from polar_proxy.store.encoding.packed_json import VERSION, pack_small_json, unpack_small_json

codec = CellCodec()


@given(st.binary(max_size=3000))
def test_bytes_round_trip(content: bytes) -> None:
    assert codec.unpack_bytes(codec.pack_bytes(content)) == content


_limits = st.sampled_from([1, 255, 256, 65_535, 65_536, 2**24 - 1, 2**24, 2**31 - 1])


@given(_limits.flatmap(lambda top: arrays.arrays(np.int32, st.integers(0, 300), elements=st.integers(0, top))))
def test_ids_round_trip(ids: np.ndarray) -> None:
    found = codec.unpack_ids(codec.pack_ids(ids))
    assert found.dtype == np.int32
    assert np.array_equal(found, ids)


@given(arrays.arrays(np.int32, st.integers(0, 50)))
def test_any_int32_round_trips(ids: np.ndarray) -> None:
    assert np.array_equal(codec.unpack_ids(codec.pack_ids(ids)), ids)


@given(arrays.arrays(np.uint32, st.integers(0, 300)))
def test_logprobs_round_trip_bit_for_bit(bits: np.ndarray) -> None:
    logprobs = bits.view(np.float32)  # any float: subnormals, infinities, NaN with any payload
    found = codec.unpack_logprobs(codec.pack_logprobs(logprobs))
    assert found.dtype == np.float32
    assert found.tobytes() == logprobs.tobytes()


def test_strided_arrays_round_trip() -> None:
    ids = np.arange(100, dtype=np.int32)[::3]
    assert np.array_equal(codec.unpack_ids(codec.pack_ids(ids)), ids)


@pytest.mark.parametrize(("top", "width"), [(200, 1), (60_000, 2), (150_000, 3), (2**25, 4)])
def test_ids_are_stored_in_the_fewest_bytes(top: int, width: int) -> None:
    noise = np.random.default_rng(0).integers(0, top, 1000).astype(np.int32)
    noise[0] = top
    assert len(codec.pack_ids(noise)) <= width * 1000 + 2


def test_repetition_is_compressed() -> None:
    assert len(codec.pack_bytes(b"spam " * 1000)) < 100


def test_refuses_unknown_version() -> None:
    cell = codec.pack_bytes(b"x")
    with pytest.raises(StoreError, match=f"reads version {VERSION}"):
        codec.unpack_bytes(bytes((VERSION + 1,)) + cell[1:])


def test_refuses_another_kind() -> None:
    with pytest.raises(StoreError, match="kind"):
        codec.unpack_ids(codec.pack_bytes(b"xxxx"))


@pytest.mark.parametrize("cell", [b"", b"\x01", codec.pack_ids(np.arange(2, dtype=np.int32) + 70_000)[:-1]])
def test_refuses_truncated_cells(cell: bytes) -> None:
    with pytest.raises(StoreError, match="the database is damaged"):
        codec.unpack_ids(cell)


def test_refuses_damaged_compression() -> None:
    cell = bytearray(codec.pack_bytes(b"spam " * 1000))
    cell[2:6] = b"none"
    with pytest.raises(StoreError, match="damaged"):
        codec.unpack_bytes(bytes(cell))


@given(st.binary(max_size=300), st.integers(0, 200), st.binary(max_size=300))
def test_bytes_with_preceding_content_round_trip(before: bytes, start: int, own: bytes) -> None:
    content = before[start:] + own
    assert codec.unpack_bytes(codec.pack_bytes(content, before), before) == content


@given(_limits, st.integers(0, 400), st.integers(0, 40_000), st.integers(0, 1000))
def test_ids_with_preceding_content_round_trip(top: int, count: int, earlier: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, top, earlier, endpoint=True).astype(np.int32)
    ids = np.concatenate([before[: count // 2], rng.integers(0, top, count, endpoint=True).astype(np.int32)])
    assert np.array_equal(codec.unpack_ids(codec.pack_ids(ids, before), before), ids)


def test_preceding_content_compresses_repetitions() -> None:
    text = np.random.default_rng(0).bytes(1000)
    assert len(codec.pack_bytes(text, b"x" * 5000 + text + b"y" * 5000)) < 60
    with pytest.raises(StoreError):  # it is needed again for unpacking
        codec.unpack_bytes(codec.pack_bytes(text, text))


def test_bytes_before_returns_the_end_of_the_joined_contents() -> None:
    contents = [bytes([n]) * 7000 for n in range(9)]
    assert bytes_before(contents) == b"".join(contents)[-CONTEXT:]
    assert bytes_before(contents[:2]) == b"".join(contents[:2])
    assert bytes_before([]) == b""


def test_logprobs_take_less_than_four_bytes() -> None:
    logprobs = np.log(np.random.default_rng(0).random(1000)).astype(np.float32)
    assert len(codec.pack_logprobs(logprobs)) < 3600


@given(st.binary(max_size=500))
def test_small_json_round_trips(text: bytes) -> None:
    assert unpack_small_json(pack_small_json(text)) == text
