"""Unpacking gives back exactly what was packed; what is not understood is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from polar_proxy.errors import StoreError
from polar_proxy.store.codec import VERSION, Codec

codec = Codec()


@given(st.binary(max_size=3000))
def test_bytes(content: bytes) -> None:
    assert codec.unpack_bytes(codec.pack_bytes(content)) == content


_limits = st.sampled_from([1, 255, 256, 65_535, 65_536, 2**24 - 1, 2**24, 2**31 - 1])


@given(_limits.flatmap(lambda top: arrays.arrays(np.int32, st.integers(0, 300), elements=st.integers(0, top))))
def test_ids(ids: np.ndarray) -> None:
    found = codec.unpack_ids(codec.pack_ids(ids))
    assert found.dtype == np.int32
    assert np.array_equal(found, ids)


@given(arrays.arrays(np.int32, st.integers(0, 50)))
def test_any_int32(ids: np.ndarray) -> None:
    assert np.array_equal(codec.unpack_ids(codec.pack_ids(ids)), ids)


@given(arrays.arrays(np.uint32, st.integers(0, 300)))
def test_logprobs_bit_for_bit(bits: np.ndarray) -> None:
    logprobs = bits.view(np.float32)  # every float there is: subnormals, infinities, NaN with any payload
    found = codec.unpack_logprobs(codec.pack_logprobs(logprobs))
    assert found.dtype == np.float32
    assert found.tobytes() == logprobs.tobytes()


def test_strided_arrays() -> None:
    ids = np.arange(100, dtype=np.int32)[::3]
    assert np.array_equal(codec.unpack_ids(codec.pack_ids(ids)), ids)


@pytest.mark.parametrize(("top", "width"), [(200, 1), (60_000, 2), (150_000, 3), (2**25, 4)])
def test_ids_take_the_narrowest_width(top: int, width: int) -> None:
    noise = np.random.default_rng(0).integers(0, top, 1000).astype(np.int32)
    noise[0] = top
    assert len(codec.pack_ids(noise)) <= width * 1000 + 2


def test_repetition_is_compressed() -> None:
    assert len(codec.pack_bytes(b"spam " * 1000)) < 100


def test_unknown_version_is_refused() -> None:
    cell = codec.pack_bytes(b"x")
    with pytest.raises(StoreError, match=f"reads version {VERSION}"):
        codec.unpack_bytes(bytes((VERSION + 1,)) + cell[1:])


def test_another_kind_is_refused() -> None:
    with pytest.raises(StoreError, match="kind"):
        codec.unpack_ids(codec.pack_bytes(b"xxxx"))


@pytest.mark.parametrize("cell", [b"", b"\x01", codec.pack_ids(np.arange(2, dtype=np.int32) + 70_000)[:-1]])
def test_cut_cells_are_refused(cell: bytes) -> None:
    with pytest.raises(StoreError):
        codec.unpack_ids(cell)


def test_damaged_compression_is_refused() -> None:
    cell = bytearray(codec.pack_bytes(b"spam " * 1000))
    cell[2:6] = b"none"
    with pytest.raises(StoreError, match="damaged"):
        codec.unpack_bytes(bytes(cell))
