"""Which recomputation keeps activations within a budget at the least cost. Pure; one choice for all ranks.

The cost is FLOPs of forwards that run again, over all layers (`layout/forward_flops.py`); bytes are those of
`layout/phases.py`, of the rank and the moment with most activations and logits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpctrain.config.schema import ModelConfig, Operation, RunConfig, TrainConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.activations import OURS, Keeps
from hpctrain.layout.fits import Changes, Room, Rules, check_memory, in_words, needed
from hpctrain.layout.forward_flops import again, forward
from hpctrain.layout.layout import Layout
from hpctrain.layout.memory import Held, held_by
from hpctrain.layout.phases import most_activations
from hpctrain.layout.recompute import in_model, without_effect
from hpctrain.layout.stages import stages
from hpctrain.layout.units import GIB, in_gib

KEY = "train.activation_budget"


class Chosen(NamedTuple):
    """A run whose recomputation is settled.

    Attributes:
        config: without a budget.
        words: what a budget has chosen, in a line; empty where there was none.
    """

    config: RunConfig
    words: str = ""


@dataclass(frozen=True)
class Way:
    """A recomputation.

    Attributes:
        train: with it, and without a budget.
        flops: of a token, in forwards that run again.
    """

    train: TrainConfig
    flops: int

    def of(self, config: RunConfig) -> RunConfig:
        """The run with it."""
        return config.model_copy(update={"train": self.train})

    def changes(self) -> Changes:
        """What says so, where it is not as usual."""
        recompute, operations, every = self.train.recomputation
        out: dict[str, int | str] = {"train.recompute": recompute}
        if recompute == "selective":
            out["train.recompute_ops"] = f"[{','.join(operations)}]"
        return out | ({"train.recompute_every": every} if every > 1 else {})

    def settings(self) -> str:
        """As on a command line."""
        return " ".join(f"{key}={value}" for key, value in self.changes().items())


def within_budget(config: RunConfig, layout: Layout, keeps: Keeps = OURS) -> Chosen:
    """Settle the recomputation of a run: the cheapest that keeps to `train.activation_budget` on every rank.

    Args:
        config: validated; without a budget it is settled.
        keeps: what the program keeps on the run's devices.

    Raises:
        ConfigError: none keeps to it; says what the least is.
    """
    budget = config.train.activation_budget
    if budget is None:
        return Chosen(config)
    held, least = held_by(config, layout), math.inf
    leanest: Way | None = None
    for way in ways(config, layout):
        size = _most(way.of(config), layout, held, keeps, max(least, budget * GIB))
        if size <= budget * GIB:
            return Chosen(way.of(config), _in_words(config, way, size))
        if size < least:
            least, leanest = size, way
    assert leanest is not None
    reason = (
        f"activations and logits take {_rounded_up(least)} GiB on the fullest rank at the least, which is with "
        f"{leanest.settings()}"
    )
    smaller = ", or a smaller train.micro_batch" if config.train.micro_batch > 1 else ""
    raise ConfigError(KEY, budget, reason, f"use {_rounded_up(least)} or more{smaller}")


def checked(config: RunConfig, layout: Layout, room: Room, rules: Rules) -> Chosen:
    """The same, of a run that is refused where it cannot fit. Arguments besides are as for `check_memory`.

    Raises:
        ConfigError: no recomputation keeps to the budget, or the run does not fit; says what would do.
    """
    chosen = within_budget(config, layout, room.keeps)

    def mend(found: Sequence[Changes]) -> str:
        if (less := _smaller(config, layout, room)) is not None:
            return f"use {KEY}={less}"
        now = next(way for way in ways(config, layout) if way.train == chosen.config.train)
        return in_words([{KEY: "null", **now.changes(), **changes} for changes in found])

    check_memory(chosen.config, layout, room, rules, in_words if config.train.activation_budget is None else mend)
    return chosen


def _smaller(config: RunConfig, layout: Layout, room: Room) -> str | None:
    """A budget with which a run fits, GiB; None where there is none."""
    held = held_by(config, layout)
    for way in ways(config, layout):
        if room.holds(needed(way.of(config), layout, room.keeps)):
            less = _rounded_up(_most(way.of(config), layout, held, room.keeps))
            changed = config.train.model_copy(update={"activation_budget": float(less)})
            found = within_budget(config.model_copy(update={"train": changed}), layout, room.keeps).config
            return less if room.holds(needed(found, layout, room.keeps)) else None
    return None


def ways(config: RunConfig, layout: Layout) -> list[Way]:
    """All recomputations of a run that differ, cheapest first."""
    plain = config.train.model_copy(update={"activation_budget": None})
    chunks = [stage.layers for stage in stages(config.model, layout)]
    usual = TrainConfig().recompute_ops
    named = [("none", usual), *(("selective", ops) for ops in _operations(config.model)), ("full", usual)]
    out = []
    for recompute, operations in named:
        for every in _everies([len(layers) for layers in chunks]) if recompute != "none" else (1,):
            train = plain.recomputing(recompute, operations, every)
            flops = sum(again(config.model, train, config.data.seq, layers) for layers in chunks)
            out.append(Way(train, flops))
    return sorted(out, key=lambda way: way.flops)


def _operations(model: ModelConfig) -> Iterator[tuple[Operation, ...]]:
    """The sets of operations of which each changes something."""
    there = in_model(model)
    for number in range(1, len(there) + 1):
        for some in itertools.combinations(there, number):
            if not any(without_effect(model, some, operation) for operation in some):
                yield some


def _everies(sizes: Sequence[int]) -> list[int]:
    """Values of `recompute_every` that compute different numbers of layers again, of chunks of these sizes."""
    found: dict[tuple[int, ...], int] = {}
    for every in range(1, max(1, *sizes) + 1):
        found.setdefault(tuple(-(-size // every) for size in sizes), every)
    return list(found.values())


def _most(config: RunConfig, layout: Layout, held: Sequence[Held], keeps: Keeps, enough: float = math.inf) -> int:
    """Bytes of activations and logits on the rank that has most; of one that has more than enough, where there is."""
    most = 0
    for of_rank in held:
        most = max(most, most_activations(config, layout, of_rank, keeps))
        if most > enough:
            break
    return most


def _in_words(config: RunConfig, way: Way, size: int) -> str:
    share = way.flops / forward(config.model, config.data.seq)
    return (
        f"{KEY}={config.train.activation_budget:g} chose {way.settings()}: activations and logits take {in_gib(size)} "
        f"GiB at most, and {share:.2%} of the forward FLOPs are computed again"
    )


def _rounded_up(size: float) -> str:
    """Bytes as GiB, at least as many, with three digits."""
    digits = 10.0 ** (math.floor(math.log10(size / GIB)) - 2)
    return f"{math.ceil(size / GIB / digits) * digits:.12g}"
