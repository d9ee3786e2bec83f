"""What waits at once on a rank, played with a few micro-batches, is what waits with all."""

from __future__ import annotations

from itertools import product

import pytest

from hpctrain.layout.activations import Activations
from hpctrain.layout.alive import alive, few
from hpctrain.layout.layout import Layout
from hpctrain.layout.schedule import make_schedule

SHAPES = [
    *product(["gpipe", "1f1b", "zb-h1"], [1, 2, 3, 4], [1]),
    *product(["interleaved", "zb-h1"], [1, 2, 3, 4], [2, 3]),
    *product(["zb-v"], [1, 2, 3, 4], [2]),
    ("interleaved", 9, 2),
]


def most(layout: Layout, micro_batches: int, place: int, sizes: list[Activations]) -> dict[tuple[bool, int, int], int]:
    """Bytes that wait at the most, by kind of action, chunk, and backwards before; the whole list played."""
    schedule = make_schedule(layout.schedule, layout.pp, layout.chunks, micro_batches)
    out: dict[tuple[bool, int, int], int] = {}
    live = backwards = 0
    for action in schedule.ranks[place]:
        size = sizes[chunk := schedule.held[place].index(action.stage)]
        if action.kind == "backward_weight":
            live -= size.left
            continue
        forward = action.kind == "forward"
        live += size.kept * forward
        at = forward, chunk, min(backwards, 2)
        out[at] = max(out.get(at, 0), live)
        if not forward:
            backwards += 1
            live += size.left * (action.kind == "backward_input") - size.kept
    return out


@pytest.mark.parametrize(("schedule", "pp", "chunks"), SHAPES)
def test_a_few_micro_batches_are_as_good_as_all(schedule: str, pp: int, chunks: int) -> None:
    layout = Layout(pp=pp, schedule=schedule, chunks=chunks)
    sizes = [Activations(7 + 5 * chunk, 0, 3 + 9 * chunk, 0) for chunk in range(chunks)]
    groups = 4 * chunks + 3 + pp
    for number in (1, pp, groups * pp, groups * pp + pp // 2, (groups + 1) * pp - 1):
        assert number < pp * groups or pp == 1 or few(schedule, pp, chunks, number)[0] < number
        for place in range(pp):
            found: dict[tuple[bool, int, int], int] = {}
            for moment in alive(layout, number, place):
                found[moment[:3]] = max(found.get(moment[:3], 0), moment.kept(sizes))
            assert found == most(layout, number, place, sizes)


def test_what_waits_is_counted_by_chunk() -> None:
    """The first rank of two under 1F1B: 2 forwards before the first backward, and 2 alive from then on."""
    found = alive(Layout(pp=2), 1000, 0)
    assert {(m.forward, m.backwards): m.whole for m in found} == {
        (True, 0): (2,), (True, 1): (2,), (True, 2): (2,), (False, 0): (2,), (False, 1): (2,), (False, 2): (2,),
    }  # fmt: skip


def test_under_gpipe_all_wait() -> None:
    assert max(m.whole for m in alive(Layout(pp=2, schedule="gpipe"), 1000, 0)) == (1000,)


def test_a_split_backward_leaves_a_part() -> None:
    moments = alive(Layout(pp=4, schedule="zb-h1"), 64, 3)
    assert max(sum(m.whole) + sum(m.parts) for m in moments) == 4 and max(m.parts for m in moments) == (3,)
