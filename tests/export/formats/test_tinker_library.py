"""Tinker's own types accept the records. Marked `full`: `pip install tinker==0.38.0`; no account is needed."""

from __future__ import annotations

import numpy as np
import pytest

from polar_proxy.export.formats import RecordConverter, read_training_row, tinker, with_advantages
from tests.export.formats.row_factory import group

pytest.importorskip("tinker", reason="needs Tinker's client: pip install tinker==0.38.0")
pytestmark = pytest.mark.full


def test_records_are_datums() -> None:
    rows = with_advantages(group())
    records = RecordConverter("tinker")
    for row in rows:
        (record,) = records([row])
        made, read = tinker.load(record), read_training_row(row)
        ids = list(read.token_ids)
        assert made.model_input.to_ints() == ids[:-1]
        inputs = {name: tensor.to_numpy() for name, tensor in made.loss_fn_inputs.items()}
        assert inputs["target_tokens"].tolist() == ids[1:]
        assert inputs["target_tokens"].dtype == np.int64
        trained = inputs["advantages"] != 0
        assert trained.tolist() == [False] * 2 + [bool(bit) for bit in read.loss_mask]
        np.testing.assert_array_equal(inputs["logprobs"][2:], np.array(read.logprobs, dtype=np.float32))
        assert set(inputs["advantages"][trained]) == {np.float32(row["advantage"])}


def test_datum_survives_serialisation() -> None:
    """The serialised form is the one that Tinker's client sends."""
    from tinker.types._pydantic_types.datum import Datum

    (record,) = RecordConverter("tinker")(with_advantages(group())[:1])
    read = Datum.model_validate(record)
    assert read.model_input.to_ints() == record["model_input"]["chunks"][0]["tokens"]
