"""Placements: together the ranks hold every element, and each says truly who else holds it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.schema import ModelConfig, MoeConfig
from hpctrain.layout.layout import EXPERT_AXES, Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import DENSE, EXPERT, flat_boxes, placements, replica_groups

MODELS = {
    "gqa": ModelConfig(layers=1, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, vocab=53, bias=True),
    "mqa": ModelConfig(layers=1, hidden=24, heads=4, kv_heads=1, head_dim=6, ffn=40, vocab=54),
    "gpt": ModelConfig(layers=1, hidden=24, heads=4, vocab=51, position="learned", norm="layernorm", tied=True),
}


MOE = ModelConfig(layers=2, hidden=24, heads=4, moe=MoeConfig(experts=8, top_k=2, ffn=12, shared_ffn=8, dense_layers=1))
STAGES = [
    Layout(),
    Layout(dp=8, ep=4),
    Layout(dp=2, tp=2, ep=4),
    Layout(dp=4, tp=2),
    Layout(dp=4, tp=2, ep=2, etp=2),
    Layout(dp=2, tp=4, ep=2, sp=True),
    Layout(pp=2, dp=2, tp=2, ep=2, etp=2),
]


@pytest.mark.parametrize("layout", STAGES, ids=Layout.describe)
def test_every_expert_is_held_once_for_each_index_of_edp(layout):
    records = {rank: placements(MOE, layout, rank) for rank in range(layout.world)}
    specs = [spec for spec in parameter_specs(MOE) if "experts" in spec.cuts]
    assert len(specs) == 3
    for spec in specs:
        held = np.zeros((layout.edp, *spec.shape), int)
        for rank, mine in records.items():
            if spec.name not in mine:
                continue
            record, at = mine[spec.name], layout.coordinates(rank, EXPERT_AXES)
            (box,) = record.boxes
            assert record.reduced_over == EXPERT and record.partial_over == () and record.replicas == (rank,)
            assert box.shape[0] == 8 // layout.ep and box.numel == spec.numel // (layout.ep * layout.etp)
            assert box.start[0] == at["ep"] * box.shape[0], "consecutive experts"
            same = [r for r, other in records.items() if spec.name in other and other[spec.name].boxes == record.boxes]
            assert tuple(same) == layout.group_of(rank, "edp"), "its gradient is summed over those that hold the same"
            held[at["edp"]][tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))] += 1
        assert (held == 1).all(), spec.name


def test_routers_are_whole_everywhere_and_see_parts_under_sp():
    for layout in STAGES:
        for rank in range(layout.world):
            record = placements(MOE, layout, rank).get("layers.1.moe.router.weight")
            if record is not None:
                assert record.local_shape == (8, 24) and record.reduced_over == DENSE
                assert record.partial_over == (("tp",) if layout.sp else ())


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
