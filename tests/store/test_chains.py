"""Chains: joined nodes are the prompt, and prompts with a common beginning share nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar_proxy.store.encoding.chains import (
    bytes_chain,
    cut_segments,
    node_id,
    token_chain,
)
from polar_proxy.store.encoding.serializer import CallSerializer, TableRow
from tests.factories import END, INFO, call_record, token_ids

_tokens = st.lists(st.integers(0, 20), max_size=400).map(lambda values: np.array(values, dtype=np.int32))
_ends = st.sampled_from([(), (END,), (END, 3)])


@given(_tokens, _ends)
def test_nodes_tile_the_prompt(prompt: np.ndarray, ends: tuple[int, ...]) -> None:
    nodes = token_chain(prompt, ends)
    pieces = [np.asarray(node.content) for node in nodes]
    assert np.array_equal(np.concatenate([*pieces, token_ids()]), prompt)
    assert [node.depth for node in nodes] == list(range(len(nodes)))
    assert [node.parent for node in nodes] == [None, *(node.id for node in nodes)][: len(nodes)]
    assert [node.chain_length for node in nodes] == list(np.cumsum([piece.size for piece in pieces]))
    assert all(node.length > 0 for node in nodes)


@given(_tokens, _tokens, _tokens, _ends)
def test_common_beginnings_share_all_but_the_last_segment(
    start: np.ndarray, one: np.ndarray, other: np.ndarray, ends: tuple[int, ...]
) -> None:
    first = token_chain(np.concatenate([start, one]), ends)
    second = token_chain(np.concatenate([start, other]), ends)
    shared = {node.id for node in first} & {node.id for node in second}
    assert len(shared) >= len(cut_segments(start, ends)[:-1])


def test_segments_end_after_the_end_of_turn() -> None:
    prompt = np.ones(120, dtype=np.int32)
    prompt[[39, 41, 95]] = END
    assert cut_segments(prompt, (END,)) == [40, 96, 120]  # a turn of two tokens gets no row


def test_fixed_segments_without_an_end_of_turn() -> None:
    assert cut_segments(np.ones(600, dtype=np.int32), ()) == [256, 512, 600]


def test_long_turns_are_cut() -> None:
    prompt = np.ones(3000, dtype=np.int32)
    prompt[2500] = END
    assert cut_segments(prompt, (END,)) == [1024, 2048, 2501, 3000]


def test_node_ids_depend_on_all_ancestors() -> None:
    one, other = bytes_chain("message", [b"a", b"c"]), bytes_chain("message", [b"b", b"c"])
    assert one[1].id != other[1].id
    assert one[0].id != bytes_chain("tools", [b"a"])[0].id
    assert one[1].id == node_id(one[0].id, "message", b"c")


@given(_tokens, _tokens, _ends)
def test_continuing_a_chain_gives_the_same_nodes(start: np.ndarray, more: np.ndarray, ends: tuple[int, ...]) -> None:
    whole = token_chain(np.concatenate([start, more]), ends)
    for node in token_chain(start, ends)[:-1]:
        rest = token_chain(np.concatenate([start, more]), ends, after=node)
        assert [n.id for n in whole[node.depth + 1 :]] == [n.id for n in rest]
        assert [(n.depth, n.chain_length) for n in whole[node.depth + 1 :]] == [(n.depth, n.chain_length) for n in rest]


@given(st.lists(st.tuples(st.lists(st.binary(max_size=2), max_size=4), _tokens, _ends), max_size=6), st.booleans())
def test_cached_chains_do_not_change_the_rows(
    requests: list[tuple[list[bytes], np.ndarray, tuple[int, ...]]], growing: bool
) -> None:
    """A serializer with a cache returns the rows of a fresh one, without those that it returned before."""
    caching, before = CallSerializer(), token_ids()
    seen: dict[bytes, tuple[int, TableRow]] = {}
    for messages, prompt, ends in requests:
        if growing:
            before = prompt = np.concatenate([before, prompt])
        call = call_record(
            "sess_1", messages=tuple(messages), prompt_ids=prompt, engine=replace(INFO, eos_token_ids=ends)
        )
        fresh, mine = CallSerializer().serialize([call]), caching.serialize([call])
        assert mine.calls == fresh.calls
        assert {key: seen[key] for key in fresh.nodes if key in seen} | mine.nodes == fresh.nodes
        seen |= mine.nodes
        caching.mark_stored(mine)
