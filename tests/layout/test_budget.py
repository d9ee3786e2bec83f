"""A budget of activations: the cheapest recomputation that keeps to it on every rank, or a refusal with the least."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError
from hpctrain.layout.activations import ON_CPU, OURS, Keeps
from hpctrain.layout.budget import Way, checked, ways, within_budget
from hpctrain.layout.fits import Room, needed
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import held_by
from hpctrain.layout.phases import most_activations, phases
from hpctrain.layout.units import GIB

RUNS = [
    ("llama-8b", 8, "sharding.stage=3 data.seq=4096 train.micro_batch=1"),
    ("llama-8b", 16, "sharding.engine=fsdp parallel.pp=2 parallel.stage_layers=[15,17] data.seq=2048"),
    ("gpt-tiny", 4, "parallel.pp=2 parallel.schedule=interleaved parallel.chunks=2 parallel.tp=2 parallel.sp=true"),
    ("gpt-tiny", 2, "parallel.tp=1 parallel.pp=2 parallel.schedule=zb-h1 train.micro_batch=2"),
    ("moe-tiny", 2, "parallel.ep=2 model.moe.shared_ffn=64 model.moe.dense_layers=1"),
]


def of(recipe: str, world: int, overrides: str, budget: float | None = None) -> tuple[RunConfig, Layout]:
    more = [] if budget is None else [f"train.activation_budget={budget!r}"]
    tp = [] if "parallel.tp" in overrides else ["parallel.tp=1"]
    config = load(recipe, [*overrides.split(), *tp, *more])
    validate(config, world)
    return config, Layout.of(config.parallel, world)


def peak(config: RunConfig, layout: Layout, keeps: Keeps = OURS) -> int:
    """Most activations and logits of any rank."""
    return max(most_activations(config, layout, of_rank, keeps) for of_rank in held_by(config, layout))


def shown(config: RunConfig, layout: Layout) -> int:
    """Most of them in the table of `hpctrain memory`, where buffers count too for what is the fullest moment."""
    every = (phases(config, layout, layout.rank(pp=place)) for place in range(layout.pp))
    return max(parts.activations + parts.logits for rank in every for parts in rank.at.values())


def budgets(recipe: str, world: int, overrides: str) -> list[float]:
    config, layout = of(recipe, world, overrides)
    sizes = sorted({peak(way.of(config), layout) for way in ways(config, layout)})
    return [sizes[0] / GIB, *((a + b) / 2 / GIB for a, b in itertools.pairwise(sizes)), 2 * sizes[-1] / GIB]


@pytest.mark.parametrize(("recipe", "world", "overrides"), RUNS)
def test_the_cheapest_that_keeps_to_it_is_chosen(recipe: str, world: int, overrides: str) -> None:
    """Whatever the budget: what is chosen keeps to it, nothing cheaper does, and it is a run like any other."""
    found = budgets(recipe, world, overrides)
    for budget in found[:: max(1, len(found) // 6)] + found[-1:]:
        config, layout = of(recipe, world, overrides, budget)
        chosen, words = within_budget(config, layout)
        validate(chosen, world)
        assert chosen.train.activation_budget is None
        assert shown(chosen, layout) <= peak(chosen, layout) <= budget * GIB
        cheaper = next(way for way in ways(config, layout) if way.train == chosen.train).flops
        others = [way for way in ways(config, layout) if way.flops < cheaper]
        assert not any(peak(way.of(config), layout) <= budget * GIB for way in others[-12:] + others[::9])
        assert words.count("\n") == 0 and Way(chosen.train, 0).settings() in words


def test_more_room_never_costs_more() -> None:
    recipe, world, overrides = RUNS[0]
    costs = []
    for budget in budgets(recipe, world, overrides):
        config, layout = of(recipe, world, overrides, budget)
        chosen = within_budget(config, layout).config.train
        costs.append(next(way.flops for way in ways(config, layout) if way.train == chosen))
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[len(costs) // 2] > costs[-1] == 0


def test_pointwise_operations_come_before_products() -> None:
    """llama-8b keeps 24.3 GiB; norms and activations cost nothing beside what MLPs do."""
    recipe, world, overrides = RUNS[0]
    for budget, recompute, operations in (
        (25.0, "none", ("core_attn",)),
        (18.0, "selective", ("activation",)),
        (15.5, "selective", ("layernorm", "activation")),
        (10.5, "selective", ("mlp",)),
        (4.0, "full", ("core_attn",)),
    ):
        train = within_budget(*of(recipe, world, overrides, budget)).config.train
        assert (train.recompute, train.recompute_ops) == (recompute, operations), budget


@pytest.mark.parametrize(("recipe", "world", "overrides"), RUNS)
def test_the_least_is_named_where_none_keeps_to_it(recipe: str, world: int, overrides: str) -> None:
    config, layout = of(recipe, world, overrides, 1e-9)
    with pytest.raises(ConfigError) as caught:
        within_budget(config, layout)
    said = str(caught.value)
    assert caught.value.path == "train.activation_budget" and "\n" not in said
    least = float(re.findall(r"use ([\d.e-]+) or more", said)[0])
    within_budget(*of(recipe, world, overrides, least))
    with pytest.raises(ConfigError):
        within_budget(*of(recipe, world, overrides, 0.98 * least))


def test_no_budget_changes_nothing() -> None:
    config, layout = of(*RUNS[0])
    assert within_budget(config, layout) == (config, "")


def test_the_choice_is_of_what_the_device_keeps() -> None:
    """RMSNorm keeps more on a CPU."""
    recipe, world, overrides = RUNS[0]
    config, layout = of(recipe, world, overrides, 24.5)
    assert within_budget(config, layout).config.train.recompute == "none"
    assert within_budget(config, layout, ON_CPU).config.train.recompute != "none"


def refused(room: Room, **more: Any) -> str:
    config, layout = of(*RUNS[0], **more)
    with pytest.raises(ConfigError) as caught:
        checked(config, layout, room, validate)
    assert "\n" not in str(caught.value) and caught.value.path == "memory"
    return caught.value.fix


def test_a_smaller_budget_is_the_mend_of_a_run_that_does_not_fit() -> None:
    config, layout = of(*RUNS[0])
    room = Room(needed(config, layout).total - 4 * GIB, 1 << 50)
    fix = refused(room, budget=60.0)
    budget = float(fix.removeprefix("use train.activation_budget="))
    assert 10 < budget < 24.3
    mended, _ = of(*RUNS[0], budget=budget)
    assert room.holds(needed(checked(mended, layout, room, validate).config, layout))


def test_what_fits_without_a_budget_is_the_mend_where_none_is_small_enough() -> None:
    config, layout = of(*RUNS[0])
    state = needed(config, layout).total - peak(config, layout)
    room = Room(state + GIB, 1 << 50)
    fix = refused(room, budget=60.0)
    each = fix.removeprefix("use ").split(", or ")
    for settings in each:  # whole, each by itself
        assert settings.startswith("train.activation_budget=null train.recompute=")
        assert settings.count("train.recompute=") == 1
        mended, changed = of(RUNS[0][0], RUNS[0][1], f"{RUNS[0][2]} {settings}")
        validate(mended, RUNS[0][1])
        assert room.holds(needed(mended, changed))
    assert refused(Room(1 << 20, 1 << 20), budget=60.0) == "use more ranks or a smaller model"


def test_it_fits_as_it_is() -> None:
    config, layout = of(*RUNS[0], budget=18.0)
    chosen = checked(config, layout, Room(1 << 50, 1 << 50), validate)
    assert chosen == within_budget(config, layout) and "chose train.recompute=selective" in chosen.words
