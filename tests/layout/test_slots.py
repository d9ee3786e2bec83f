"""Slots and chunks: every element has one place, whatever the fragments, the chunk and the share."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.layout.slots import UNIT, Row

FRAGMENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5 * UNIT)), min_size=1, max_size=12)


@given(FRAGMENTS, st.integers(1, 4), st.floats(0, 1))
def test_every_element_has_one_place(found: list[tuple[int, int]], units: int, share: float) -> None:
    fragments = [(f"p{i}", group, numel) for i, (group, numel) in enumerate(sorted(found, key=lambda f: f[0]))]
    row = Row(fragments, units * UNIT, share)
    assert sum(c.size for c in row.chunks) == row.size == row.near + row.far
    at = 0
    for chunk in row.chunks:
        assert chunk.base == at and 0 < chunk.size <= units * UNIT and chunk.base % UNIT == chunk.size % UNIT == 0
        at += chunk.size
    for name, group, numel in fragments:
        slot = row.slots[name]
        spans = list(row.of_slot(slot))
        assert slot.base % UNIT == 0 and [s.in_slot for s in spans] == [
            sum(s.numel for s in spans[:i]) for i in range(len(spans))
        ]
        assert sum(s.numel for s in spans) == numel and all(s.chunk.group == group for s in spans)
    by_slot = {(s.slot.name, s.in_slot, s.in_chunk, s.numel) for n in row.slots for s in row.of_slot(row.slots[n])}
    by_chunk = {(s.slot.name, s.in_slot, s.in_chunk, s.numel) for c in row.chunks for s in row.of_chunk(c)}
    assert by_slot == by_chunk
    for far in (False, True):
        kept = [c for c in row.chunks if c.far == far]
        assert [c.at for c in kept] == [sum(c.size for c in kept[:i]) for i in range(len(kept))]
    assert abs(row.far - share * row.size) <= units * UNIT


def test_a_share_is_spread_evenly() -> None:
    row = Row([("p", 0, 100 * UNIT)], UNIT, 0.25)
    assert row.far == 25 * UNIT
    gaps = [i for i, chunk in enumerate(row.chunks) if chunk.far]
    assert {b - a for a, b in itertools.pairwise(gaps)} == {4}
