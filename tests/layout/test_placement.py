"""Placements: together the ranks hold every element, and each says truly who else holds it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import flat_boxes, placements, replica_groups

MODELS = {
    "gqa": ModelConfig(layers=1, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=53, bias=True),
    "mqa": ModelConfig(layers=1, hidden=24, heads=4, kv_heads=1, head_dim=6, ffn=40, vocab=54),
    "gpt": ModelConfig(layers=1, hidden=24, heads=4, vocab=51, position="learned", norm="layernorm", tied=True),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("tp,dp", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_ranks_together_hold_every_element(model, tp, dp, sp):
    layout = Layout(dp=dp, tp=tp, sp=sp)
    records = [placements(model, layout, rank) for rank in range(layout.world)]
    for spec in parameter_specs(model):
        held = np.zeros((dp, *spec.shape), int)
        for rank, mine in enumerate(records):
            record = mine[spec.name]
            same = [r for r in range(layout.world) if records[r][spec.name].boxes == record.boxes]
            group = layout.group_of(rank, "tp")
            assert record.replicas == tuple(r for r in same if r in group)
            assert (record.partial_over == ("tp",)) == (len(record.replicas) > 1 and (sp or any(spec.cuts)))
            (box,) = record.boxes
            assert record.local_shape == box.shape
            if record.owner == rank:
                copy = layout.coordinates(rank)["dp"]
                held[copy][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))] += 1
        assert (held == 1).all(), f"{spec.name}: owners hold every element once"


def test_key_value_heads_fewer_than_tp_are_replicated_in_neighbours():
    records = [placements(MODELS["gqa"], Layout(tp=4), r)["layers.0.attention.qkv.k.weight"] for r in range(4)]
    assert [r.boxes[0].start for r in records] == [(0, 0), (0, 0), (6, 0), (6, 0)]
    assert [r.replicas for r in records] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert replica_groups(MODELS["gqa"], Layout(tp=4, dp=2)) == (((0, 1), (2, 3), (4, 5), (6, 7)),)
    assert replica_groups(MODELS["mqa"], Layout(tp=4)) == (), "the whole tp group has its own"
    assert replica_groups(MODELS["gpt"], Layout(tp=4)) == ()


def test_query_heads_stay_with_their_key_value_head():
    model, layout = ModelConfig(hidden=32, heads=8, kv_heads=2, head_dim=4), Layout(tp=4)
    for rank in range(4):
        mine = placements(model, layout, rank)
        q, k = (mine[f"layers.0.attention.qkv.{n}.weight"].boxes[0] for n in "qk")
        heads = range(q.start[0] // 4, (q.start[0] + q.shape[0]) // 4)
        assert {head // 4 for head in heads} == {k.start[0] // 4}


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_flat_ranges_become_boxes_in_order(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - start))
    whole = np.arange(total).reshape(shape)
    boxes = flat_boxes(shape, start, numel)
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(b.start, b.shape))].ravel() for b in boxes]
    got = np.concatenate(parts) if parts else np.zeros(0, int)
    assert got.tolist() == list(range(start, start + numel))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(b.start == b.local for b in boxes)
