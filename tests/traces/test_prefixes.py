"""The table of sequences: it finds every sequence with which another one begins, and hardly any other."""

from __future__ import annotations

import numpy as np
import pytest

from polar_proxy.traces.prefixes import PrefixTable


@pytest.mark.parametrize("count", [5, 400])
@pytest.mark.parametrize("seed", range(5))
def test_finds_all_beginnings(count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    whole = random.integers(0, 4, 300, dtype=np.int32)
    table = PrefixTable()
    sequences = []
    for number in range(count):
        source = whole if number % 3 else random.integers(0, 4, 300, dtype=np.int32)
        ends = np.sort(random.integers(1, 300, 3))
        for start, end in zip([0, *ends], ends, strict=False):
            table.extend(number, source[start:end])
        sequences.append(source[: ends[-1]])
    for size in (1, 2, 50, 299, 300):
        prompt = whole[:size]
        beginnings = {
            number for number, ids in enumerate(sequences) if len(ids) <= size and (prompt[: len(ids)] == ids).all()
        }
        found = table.candidates(prompt)
        assert beginnings <= set(found)
        if count == 400:
            assert set(found) == beginnings
            assert beginnings or size < 299
