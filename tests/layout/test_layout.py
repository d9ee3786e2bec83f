"""Ranks on axes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.schema import ParallelConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import AXES, EXPERT_AXES, Layout, split

sizes = st.integers(1, 3)
layouts = st.builds(Layout, pp=sizes, dp=sizes, cp=sizes, tp=sizes)


@given(layouts, st.sampled_from([AXES, EXPERT_AXES]))
def test_ranks_and_coordinates_are_inverse(layout, axes):
    seen = [layout.rank(axes, **layout.coordinates(rank, axes)) for rank in range(layout.world)]
    assert seen == list(range(layout.world))


@given(layouts, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world(layout, axes):
    groups = layout.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world))
    for group in groups:
        assert list(group) == sorted(group)
        for rank in group:
            assert layout.group_of(rank, *axes) == group
            home, other = layout.coordinates(rank), layout.coordinates(group[0])
            assert all(home[a] == other[a] for a in AXES if a not in axes)


def test_tp_is_innermost_and_pp_outermost():
    layout = Layout(pp=2, dp=2, tp=2)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("dp", "cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.coordinates(6) == {"pp": 1, "dp": 1, "cp": 0, "tp": 0}
    assert layout.describe() == "8 ranks, pp=2 dp=2 tp=2 schedule=1f1b"
    assert Layout(tp=2, sp=True).describe() == "2 ranks, tp=2 sp"
    assert Layout.of(ParallelConfig(cp=2, cp_method="ulysses"), 2).describe() == "2 ranks, cp=2 cp_method=ulysses"


def test_expert_axes_factor_a_stage_again():
    layout = Layout(pp=2, dp=2, cp=1, tp=2, ep=4, etp=1)
    assert layout.edp == 1
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7)), "ep spans tp"
    layout = Layout(dp=4, tp=2, ep=2, etp=2)
    assert layout.groups("etp") == layout.groups("tp")
    assert layout.groups("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    "sizes,message",
    [
        (dict(tp=4, etp=2), "parallel.etp=2"),
        (dict(dp=2, tp=3, ep=4), "parallel.ep=4: ep x etp must divide the 6 ranks"),
        (dict(tp=0), "parallel.tp=0"),
    ],
)
def test_impossible_layouts_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Layout(**sizes)


def test_dp_is_what_is_left():
    assert Layout.of(ParallelConfig(tp=2, pp=2), 12).dp == 3
    with pytest.raises(ConfigError, match=r"parallel.tp=4: pp x cp x tp = 1 x 1 x 4 = 4 must divide the 6 ranks"):
        Layout.of(ParallelConfig(tp=4), 6)


@given(st.integers(0, 100), st.integers(1, 9))
def test_split_is_even_and_complete(total, parts):
    pieces = [split(total, parts, i) for i in range(parts)]
    assert [start for start, _ in pieces] == [sum(n for _, n in pieces[:i]) for i in range(parts)]
    counts = [n for _, n in pieces]
    assert sum(counts) == total and max(counts) - min(counts) <= 1
