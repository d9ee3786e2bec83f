"""A pipeline's time: an independent event simulation, the formulas of bubbles, and the two tiers against each other."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import Layout
from hpctrain.layout.schedule import make_schedule
from hpctrain.layout.schedule_claims import claimed_bubble
from hpctrain.layout.timeline import Times, play
from hpctrain.plan import played as played_tier
from hpctrain.plan.constants import constants
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import Machine
from hpctrain.plan.played import played, price
from hpctrain.plan.replay import end, way
from hpctrain.plan.screen import screen
from hpctrain.plan.step import blocked, crossed
from hpctrain.plan.work import Points, Runtime, Work

SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2)]


def simulate(name: str, ranks: int, chunks: int, batches: int, times: Times, ways: list[float]) -> float:
    """Events in order of time: a message arrives, or a rank is free; a rank begins its next action when it is free and
    has received what that needs. Written from what a pipeline does, without the library's dependencies."""
    schedule = make_schedule(name, ranks, chunks, batches)
    last = ranks * chunks - 1
    home = {a.stage: rank for rank, order in enumerate(schedule.ranks) for a in order}
    got: list[set[tuple[str, int, int]]] = [set() for _ in range(ranks)]
    at, busy = [0] * ranks, [False] * ranks
    events: list[tuple[float, int, int, tuple[str, int, int] | None]] = [(0.0, r, r, None) for r in range(ranks)]
    count, now = ranks, 0.0
    while events:
        now, _, rank, message = heapq.heappop(events)
        if message is None:
            busy[rank] = False
        else:
            got[rank].add(message)
        if busy[rank] or at[rank] == len(schedule.ranks[rank]):
            continue
        action = schedule.ranks[rank][at[rank]]
        kind, stage, batch = action.kind, action.stage, action.micro_batch
        if kind == "forward" and stage and ("out", stage - 1, batch) not in got[rank]:
            continue
        whole = kind in ("backward", "backward_input")
        if whole and stage != last and ("grad", stage + 1, batch) not in got[rank]:
            continue
        at[rank], busy[rank] = at[rank] + 1, True
        done = now + times.of(action)
        heapq.heappush(events, (done, count := count + 1, rank, None))
        sent = {"forward": ("out", stage + 1), "backward_weight": None}.get(kind, ("grad", stage - 1))
        if sent is not None and 0 <= sent[1] <= last:
            other = home[sent[1]]
            delay = ways[way(rank, other, ranks)] if other != rank else 0.0
            # before the rank is free, so that it may go on with what it gave itself
            heapq.heappush(events, (done + delay, -count, other, (sent[0], stage, batch)))
    assert at == [len(order) for order in schedule.ranks]
    return now


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SHAPES), st.integers(2, 5), st.integers(1, 12), st.floats(0, 2), st.integers(0, 1000)
)  # fmt: skip
def test_the_time_is_that_of_an_independent_simulation(
    shape: tuple[str, int], ranks: int, batches: int, latency: float, seed: int
) -> None:
    (name, chunks), dice = shape, random.Random(seed)
    parts = [tuple(dice.uniform(0.5, 2) for _ in range(ranks * chunks)) for _ in range(3)]
    times = Times(*parts, latency=latency)
    alike, unlike = [latency] * ranks, [latency * dice.uniform(0, 2) for _ in range(ranks)]
    for ways in (unlike, alike):
        expected = simulate(name, ranks, chunks, batches, times, ways)
        assert end(name, ranks, chunks, batches, *parts, ways) == pytest.approx(expected, rel=1e-12)
    assert play(make_schedule(name, ranks, chunks, batches), times).end == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (4, 8), (4, 16)])
def test_bubbles_are_those_of_the_formulas(name: str, chunks: int, ranks: int, batches: int) -> None:
    claim = claimed_bubble(name, ranks, chunks, batches)
    assert claim is not None
    each = (1 / chunks,) * (ranks * chunks)
    done = end(name, ranks, chunks, batches, each, each, each, [0.0] * ranks)
    assert 1 - 3 * batches / done == pytest.approx(claim.share)


def test_a_long_schedule_goes_on_as_its_middle_does(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(5)
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2)):
        layout = Layout(pp=4, schedule=name, chunks=chunks)
        times = [tuple(dice.uniform(1, 2) for _ in range(4 * chunks)) for _ in range(3)]
        monkeypatch.setattr(played_tier, "MOST", 10**9)
        whole = played(layout, 160, times, [0.1, 0.3, 0.1, 0.3])
        monkeypatch.setattr(played_tier, "MOST", 1)
        assert played(layout, 160, times, [0.1, 0.3, 0.1, 0.3]) == pytest.approx(whole, rel=2e-3)


def sample(recipe: str, number: int, seed: int) -> list[tuple[Work, Layout, Points]]:
    """Layouts of all kinds, with as many micro-batches as ranks of the pipeline at least."""
    config, dice, out = load(recipe), random.Random(seed), []
    while len(out) < number:
        tp, pp, dp, micro = (
            dice.choice([1, 2, 4, 8]),
            dice.choice([1, 2, 4, 8]),
            dice.choice([1, 4, 16]),
            dice.choice([1, 2]),
        )
        name = dice.choice(["1f1b", "interleaved", "zb-h1", "zb-v"]) if pp > 1 else "1f1b"
        chunks = {"1f1b": 1, "zb-h1": 1, "zb-v": 2, "interleaved": dice.choice([2, 4])}[name]
        moe = config.model.moe is not None
        if pp * chunks > config.model.layers or (moe and dp * tp % 8):
            continue
        batch = dp * micro * pp * dice.choice([1, 2, 4, 8])
        layout = Layout(pp=pp, dp=dp, tp=tp, sp=tp > 1, schedule=name, chunks=chunks, ep=8 if moe else 1)
        stage = dice.choice([0, 1, 3]) if not moe else 0
        points = Points.one(layout, micro, dice.choice(["none", "selective", "full"]), stage)
        out.append((Work(config.model, 2048, batch, "bf16"), layout, points))
    return out


@pytest.mark.parametrize("recipe", ["llama-70b", "gpt-175b", "mixtral-8x7b", "llama-8b"])
def test_the_two_tiers_agree_within_a_percent(recipe: str) -> None:
    machine = Machine(hardware("dgx-h100"), constants())
    for work, layout, points in sample(recipe, 25, seed=7):
        a, b = screen(machine, work, points), price(machine, work, layout, points)
        assert float(a.time[0]) == pytest.approx(float(b.time), rel=0.01), layout
        assert {name: float(a.parts[name][0]) for name in ("dp", "shard", "optimizer")} == pytest.approx(
            {name: b.parts[name] for name in ("dp", "shard", "optimizer")}, rel=1e-6
        )


def test_a_batch_of_points_is_priced_as_each_alone() -> None:
    machine = Machine(hardware("dgx-h100"), constants())
    cases = sample("llama-70b", 40, seed=3)
    work = Work(cases[0][0].model, 2048, 1024, "bf16")
    points = Points.join([c[2] for c in cases if 1024 // (c[1].dp * int(c[2].micro_batch[0])) >= c[1].pp])
    points = points.take(np.flatnonzero(points.schedule == 1))  # 1F1B, which no other point is played for
    together = screen(machine, work, points).time
    alone = [float(screen(machine, work, points.take(np.array([i]))).time[0]) for i in range(len(points))]
    assert list(together) == pytest.approx(alone, rel=1e-12) and len(alone) > 5


def test_ways_between_ranks() -> None:
    """Neighbours, and the last with the first."""
    assert [way(*pair, 4) for pair in ((0, 1), (2, 1), (2, 3), (3, 0), (0, 3), (2, 2))] == [0, 1, 2, 3, 3, -1]


@pytest.mark.parametrize(
    ("ranks", "pp", "domain", "leaves"),
    [
        (8, 4, 8, [True] * 4),
        (64, 2, 64, [True] * 2),
        (16, 8, 64, [False, False, False, True, False, False, False, True]),
        (4, 2, 8, [False, False]),  # all in one
        (4, 4, 8, [False, True, False, True]),
        (48, 3, 64, [True] * 3),  # one of a stage's ranks is enough
    ],
)
def test_a_pipeline_leaves_a_domain_where_ranks_do(ranks: int, pp: int, domain: int, leaves: list[bool]) -> None:
    """Each place of a rank and of its neighbour in the next stage, one by one."""
    by_hand = [
        any((s * ranks + i) // domain != ((s + 1) % pp * ranks + i) // domain for i in range(ranks)) for s in range(pp)
    ]
    assert [bool(away) for away in crossed(ranks, pp, domain)] == by_hand == leaves


def test_ends_of_a_pipeline_wait_for_the_neighbour_they_have() -> None:
    assert [blocked("1f1b", (1.0, 2.0, 9.0), rank) for rank in range(3)] == [(1.0, 1.0), (2.0, 1.0), (2.0, 2.0)]
    assert [blocked("interleaved", (1.0, 2.0, 9.0), r) for r in range(3)] == [(1.0, 9.0), (2.0, 1.0), (9.0, 2.0)]


def test_both_tiers_send_from_rack_to_rack() -> None:
    """128 devices of racks of 72 take 64 of each of two: a pipeline of 8 leaves a rack twice, one of 2 always."""
    machine, model = Machine(hardware("gb200-nvl72"), constants()).of(128), load("gpt-175b").model
    domain = machine.hardware.domain.model_copy(update={"devices": 128})
    whole = replace(machine, hardware=machine.hardware.model_copy(update={"domain": domain}))
    cases = [(8, "interleaved", 4, "always"), (8, "1f1b", 1, "never"), (2, "1f1b", 1, "never")]
    for pp, schedule, chunks, overlap in cases:
        layout = Layout(pp=pp, dp=128 // (4 * pp), tp=4, sp=True, schedule=schedule, chunks=chunks)
        work = Work(model, 2048, 8 * layout.dp, "bf16", Runtime(send_overlap=overlap))
        points = Points.one(layout, 1)
        a, b = screen(machine, work, points), price(machine, work, layout, points)
        assert float(a.time[0]) == pytest.approx(float(b.time), rel=0.01), layout
        assert float(a.parts["pp sends"][0]) == pytest.approx(b.parts["pp sends"])
        assert float(b.time) > float(price(whole, work, layout, points).time)


def test_sends_that_are_waited_for_cost_every_micro_batch() -> None:
    model = load("gpt-175b").model
    machine, layout = Machine(hardware("dgx-a100"), constants()), Layout(pp=8, tp=8, dp=1)
    points = Points.one(layout, 1)
    waits, goes_on = (
        price(machine, Work(model, 2048, 64, "bf16", Runtime(send_overlap=overlap)), layout, points)
        for overlap in ("never", "always")
    )
    assert waits.parts["pp sends"] > 0 and goes_on.parts["pp sends"] == 0
    assert float(waits.time) > float(goes_on.time)


def test_parts_add_up_and_name_the_bound() -> None:
    machine, layout = Machine(hardware("dgx-a100"), constants()), Layout(tp=8, dp=2)
    made = price(machine, Work(load("gpt-175b").model, 2048, 8, "bf16"), layout, Points.one(layout, 1))
    assert sum(made.at(0).values()) == pytest.approx(float(made.time)) and made.bound() == "matmul"
    assert made.parts["compute"] == pytest.approx(sum(made.detail.values()))


def test_no_micro_batch_is_an_error_of_the_caller() -> None:
    with pytest.raises(ConfigError):
        end("1f1b", 2, 1, 0, (1, 1), (1, 1), (1, 1), 0)
