"""The search: what it finds runs and fits, what it refuses it explains."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from hpctrain.config.load import load
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout.activations import Keeps, activations
from hpctrain.layout.fits import needed
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import estimate
from hpctrain.layout.schedule_claims import claimed_peak
from hpctrain.layout.stages import Stage
from hpctrain.layout.units import GIB
from hpctrain.plan import replay, step
from hpctrain.plan.candidates import candidates
from hpctrain.plan.constants import constants
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import Machine
from hpctrain.plan.room import changed, graph_sets, room
from hpctrain.plan.screen import screen
from hpctrain.plan.search import Available, available, best_with, configured, lacks, priced, refined, search
from hpctrain.plan.step import Blocks
from hpctrain.plan.work import NAMES, OWN, RECOMPUTE, Points, Work

H100 = Machine(hardware("dgx-h100"), constants())


def test_plans_fit_and_run_and_are_in_order() -> None:
    plans = search(load("llama-70b"), H100, 128, top=4)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans) and len(plans) == 4
    room_of_device = plans[0].work.runtime.usable(H100.hardware.gpu.memory.value)
    for plan in plans:
        validate(plan.config, 128)
        assert plan.layout.world == 128 and plan.memory.training <= room_of_device
        again = priced(plan.config, H100, 128, plan.work)
        assert again.seconds == pytest.approx(plan.seconds) and again.describe() == plan.describe()
    slower = search(load("llama-70b"), H100, 128, top=24)[-1]
    assert lacks(plans[0], slower).count("%") >= 1


def test_nothing_that_fits_is_faster_by_the_screen() -> None:
    config = load("llama-8b")
    work = Work.of(config)
    points = candidates(config, H100, 32)
    fits = room(config, points)[0] <= work.runtime.usable(H100.hardware.gpu.memory.value)
    least = float(screen(H100, work, points.take(np.flatnonzero(fits))).time.min())
    best = search(config, H100, 32, top=1)[0]
    assert best.seconds <= 1.01 * least


def test_every_candidate_obeys_the_rules() -> None:
    for recipe, devices in (("mixtral-8x7b", 64), ("llama-8b", 16)):
        config = load(recipe)
        points = candidates(config, H100, devices)
        for index in range(0, len(points), len(points) // 60):
            validate(configured(config, points, index, 8), devices)


def test_room_follows_the_memory_model() -> None:
    config = load("gpt-175b")
    for layout, micro, recompute, stage in (
        (Layout(pp=8, tp=8, dp=4, sp=True), 1, "none", 1),
        (Layout(pp=4, tp=4, dp=4, sp=True, schedule="interleaved", chunks=2), 2, "selective", 0),
        (Layout(tp=8, dp=16, sp=True), 1, "full", 3),
    ):
        points = Points.one(layout, micro, recompute, stage)
        chosen = configured(config, points, 0, 8)
        assert room(chosen, points)[0][0] == pytest.approx(needed(chosen, layout).training, rel=0.01)
        expected = estimate(chosen, layout).training
        assert room(chosen, points, replace(OWN, buffers=False))[0][0] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("pp", "chunks", "rank", "sets"), [(1, 1, 0, 1), (2, 1, 0, 2), (2, 1, 1, 1), (2, 2, 0, 6)])
def test_graphs_have_memory_for_what_each_chunk_has_under_way(pp: int, chunks: int, rank: int, sets: int) -> None:
    """With two chunks on the first of two ranks: 4 of the first, 2 of the second; at once it has 5 at most."""
    name = "interleaved" if chunks > 1 else "1f1b"
    made = [graph_sets(name, pp, chunks, number, rank) for number in (4 * pp, 5 * pp, 6 * pp, 20 * pp)]
    assert made == [sets] * 4 and sets >= claimed_peak(name, pp, chunks, 20 * pp, rank)


def test_room_counts_graphs_and_user_buffers() -> None:
    config = load("gpt-175b")
    layout = Layout(pp=4, tp=4, dp=4, sp=True, schedule="interleaved", chunks=2)
    points = Points.one(layout, 1, "none", 1)
    other = replace(OWN, buffers=False)
    plain = room(config, points, other)[0][0]
    hidden = config.data.seq * config.model.hidden
    assert room(config, points, replace(other, user_buffers=True))[0][0] - plain == pytest.approx(20 * hidden)
    fp8 = replace(other, keeps=replace(other.keeps, operands=1))
    more = room(config, points, replace(fp8, user_buffers=True))[0][0] - room(config, points, fp8)[0][0]
    assert more == pytest.approx((4 * 2 + 6) * hidden)
    layers = activations(changed(config, points, 0), layout, Stage(1, 0, 0, range(12), False, False)).kept / 12
    sets = graph_sets("interleaved", 4, 2, config.train.global_batch // 4, 0) - claimed_peak("interleaved", 4, 2, 64, 0)
    more = room(config, points, replace(other, graphs=True))[0][0] - plain
    assert more == pytest.approx((12 * sets + 1) * layers, rel=0.01)


def test_what_megatron_keeps_of_a_layer_with_experts() -> None:
    """Of 8 experts, 2 a token, h wide: not the router's copy in float32 (2 h) nor what experts give (2 h); with fp8 the
    norm's output for the router in bf16 beside it (h/2). On the way: what experts give twice, or 3 ffn, for each."""
    config = load("mixtral-8x7b", ["train.recompute=none"])
    tokens, h, ffn = config.data.seq * config.train.micro_batch, config.model.hidden, config.model.expert_width
    layer = Stage(1, 0, 0, range(1), False, False)
    ours, theirs = (activations(config, Layout(), layer, keeps) for keeps in (Keeps(), Keeps(routed="norm")))
    assert ours.kept - theirs.kept == pytest.approx(2 * tokens * (2 * h + 2 * h))
    bf16, fp8 = (activations(config, Layout(), layer, Keeps(operands=1, routed=how)) for how in ("copies", "norm"))
    assert bf16.kept - fp8.kept == pytest.approx(2 * tokens * (2 * h + 2 * h - h / 2))
    flowing = activations(config, Layout(), layer, Keeps(flowing=3)).passing - ours.passing
    assert flowing == pytest.approx(2 * tokens * (h + 2 * max(3 * ffn, 2 * h)))


def test_what_is_planned_fits_by_what_a_run_is_refused_by() -> None:
    """llama-8b with ZeRO 3 on 8 devices: there is room for gathered units, too, or it is no plan."""
    config, layout = load("llama-8b", ["train.recompute=full"]), Layout(dp=8)
    chosen = configured(config, points := Points.one(layout, 1, "full", 3), 0, 8)
    without, whole = estimate(chosen, layout).training, needed(chosen, layout)
    assert whole.training > without and whole.buffers > GIB
    times = np.ones(1)
    for have, found in ((without, 0), (whole.training, 1)):
        there = Available(have, 0.0, 0.0)
        assert len(refined(config, H100, Work.of(config), points, times, 1, there)) == found


def test_screening_costs_each_kind_of_layer_and_plays_each_kind_of_pipeline_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What makes it fast (`benchmarks/plan_screen.py`): ten times the layouts have no more to cost, nor to play."""
    counted: list[int] = []
    played: list[Any] = []

    def blocks(machine: Machine, work: Work, points: Points) -> Blocks:
        counted.append(len(points))
        return step.blocks(machine, work, points)

    def end(*args: Any) -> float:
        played.append(args[:4])
        return replay.end(*args)

    monkeypatch.setattr("hpctrain.plan.screen.blocks", blocks)
    monkeypatch.setattr("hpctrain.plan.screen.end", end)
    work = Work(load("gpt-175b").model, 2048, 2**17, "bf16")
    for number in (6_000, 60_000):
        screen(H100, work, drawn(number))
    kinds = len({*product((1, 2, 4, 8), (1, 2, 4), range(len(RECOMPUTE)))})
    assert counted == [kinds, kinds], "a layer depends on tp, micro-batch and recomputation alone"
    each = 2 * 4 * len(RECOMPUTE)
    assert len(played) == 2 * each, "both ends of what is between, of 4 interleaved pipelines, by recomputation"


def drawn(number: int) -> Points:
    """Layouts of 2,048 devices, interleaved or not."""
    dice = np.random.default_rng(0)
    tp, pp = dice.choice([1, 2, 4, 8], number), dice.choice([1, 2, 4, 8, 16], number)
    one = np.ones(number, dtype=np.int64)
    chunks = np.where(pp > 1, dice.choice([1, 2], number), 1)
    schedule = np.where(chunks == 1, NAMES.index("1f1b"), NAMES.index("interleaved"))
    return Points(
        tp=tp, sp=(tp > 1) * one, pp=pp, dp=2048 // (tp * pp), cp=one, ep=one, etp=one,
        micro_batch=dice.choice([1, 2, 4], number), chunks=chunks, schedule=schedule,
        recompute=dice.choice(len(RECOMPUTE), number), stage=dice.choice([0, 1, 3], number), reshard=one,
        offload=0 * one,
    )  # fmt: skip


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(ConfigError) as error:
        search(load("llama-405b"), H100, 16)
    assert "needs" in str(error.value) and "devices are enough" in str(error.value)
    assert search(load("llama-405b"), H100, 256, top=1)[0].layout.world == 256


def test_a_batch_that_nothing_divides_says_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"must be a multiple of dp.*use"):
        search(load("llama-8b", ["train.global_batch=7"]), H100, 1024)


def test_offload_makes_room() -> None:
    config = load("llama-70b", ["train.global_batch=16"])
    with pytest.raises(ConfigError):
        search(config, H100, 8)
    plan = search(config, H100, 8, top=1, offload=True)[0]
    assert "offload=" in plan.describe() and plan.price.at(0)["offload"] > 0


def test_one_device_with_its_host_is_enough() -> None:
    """ZeRO on one rank, to offload: without, nothing fits, and none is sharded."""
    config = load("llama-8b", ["train.global_batch=16"])
    with pytest.raises(ConfigError, match="let --offload"):
        search(config, H100, 1)
    plan = search(config, H100, 1, top=1, offload=True)[0]
    assert plan.config.sharding.offload.optimizer == "cpu" and plan.config.sharding.stage
    assert set(candidates(config, H100, 1).stage) == {0}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ("data.seq=262144 train.global_batch=16", "data.seq"),
        ("optimizer.warmup_steps=200000", "optimizer.warmup_steps"),
        ("model.hidden=4095", "model.heads"),
    ],
)
def test_what_no_layout_mends_is_said_as_it_is(settings: str, path: str, offload: bool) -> None:
    with pytest.raises(ConfigError) as error:
        search(load("llama-8b", settings.split()), H100, 64, offload=offload)
    assert error.value.path == path


def test_a_rule_that_refuses_all_that_fit_is_said_and_not_lack_of_memory() -> None:
    """Though the last in the order is refused for its memory."""
    config = load("llama-8b", ["data.seq=262144", "train.global_batch=16"])
    points = Points.join([Points.one(Layout(tp=8, cp=8, sp=True), 1, "full"), Points.one(Layout(dp=16, cp=4), 1)])
    plenty = Available(200e9, 0.0, 0.0)
    with pytest.raises(ConfigError, match=r"model\.max_seq"):
        refined(config, H100, Work.of(config), points, np.array([1.0, 2.0]), 1, plenty)


def test_offloaded_plans_keep_to_the_rules_and_to_all_memories() -> None:
    config = load("llama-70b", ["train.global_batch=16"])
    for plan in search(config, H100, 16, top=4, offload=True):
        validate(plan.config, 16)
        assert available(H100, plan.work).holds(plan.memory)


def test_what_hosts_do_not_hold_is_said() -> None:
    """70 billion parameters' state on a host of 64 GB whose drives hold 1."""
    host = H100.hardware.host
    small = {
        name: getattr(host, name).model_copy(update={"value": value})
        for name, value in (("memory", 64e9), ("nvme", 1e9))
    }
    machine = replace(H100, hardware=H100.hardware.model_copy(update={"host": host.model_copy(update=small)}))
    with pytest.raises(
        ConfigError, match=r"GiB (of host memory|on drives) on a rank at the least .* its host has"
    ) as e:
        search(load("llama-70b", ["train.global_batch=16"]), machine, 8, offload=True)
    assert "let --offload" not in str(e.value)


def test_the_batch_that_is_suggested_works() -> None:
    for recipe, devices, settings in (("llama-405b", 100_000, []), ("llama-8b", 1024, ["train.global_batch=1"])):
        with pytest.raises(ConfigError) as error:
            candidates(load(recipe, settings), H100, devices)
        batch = str(error.value).split("; use ")[1].split(",")[0]
        assert len(candidates(load(recipe, [f"train.global_batch={batch}"]), H100, devices))


def test_ranks_on_cpus_have_their_memory() -> None:
    machine = Machine(hardware("cpu-lab"), constants())
    assert search(load("gpt-tiny"), machine, 2, top=1)[0].layout.world == 2


def test_settings_can_be_held() -> None:
    config = load("llama-8b", ["parallel.tp=2", "train.micro_batch=2"])
    plan = best_with(config, H100, 16, Work.of(config), ("parallel.tp", "train.micro_batch"))
    assert (plan.layout.tp, int(plan.points.micro_batch[0])) == (2, 2)
    with pytest.raises(ConfigError, match="no layout has these settings"):
        bad = load("llama-8b", ["parallel.tp=3"])
        best_with(bad, H100, 16, Work.of(bad), ("parallel.tp",))
