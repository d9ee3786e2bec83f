"""Pipeline schedules as plain data: what each rank of the pp axis computes, and in which order.

A model is cut into `stages x chunks` virtual stages in model order. Which rank holds which of them, and everything
else about a schedule, can be read off the lists of actions: one runtime executes any of them, one validator proves
them (`schedule_check`), one player prices them (`timeline`). Transfers follow from the lists (`transfers`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hpctrain.errors import ConfigError

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one micro-batch on one virtual stage.

    `backward` is the whole of it; `backward_input` makes the gradient of the stage's input and leaves the
    gradients of its weights to a later `backward_weight`.
    """

    kind: Kind
    stage: int
    micro_batch: int


Order = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline computes.

    Attributes:
        stages: ranks of the pp axis.
        chunks: virtual stages a rank holds.
        ranks: per rank its actions in order.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    ranks: tuple[Order, ...]

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Per rank the virtual stages it holds, in model order."""
        return tuple(tuple(sorted({action.stage for action in order})) for order in self.ranks)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {stage: (rank, chunk) for rank, held in enumerate(self.held) for chunk, stage in enumerate(held)}

    def home(self, stage: int) -> int:
        """The rank of the pp axis that holds a virtual stage."""
        return self._places[stage][0]

    def chunk(self, stage: int) -> int:
        """Which of its rank's chunks a virtual stage is, counted in model order."""
        return self._places[stage][1]


def make_schedule(name: str, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """The schedule of that name, a pure function of its arguments.

    Args:
        name: one of `SCHEDULES`.
        stages: ranks of the pp axis, 1 or more.
        chunks: virtual stages a rank holds.
        micro_batches: of one step, 1 or more.

    Raises:
        ConfigError: no schedule of that name, or one that cannot have so many chunks.
    """
    if name not in SCHEDULES:
        raise ConfigError("parallel.schedule", name, f"must be one of {', '.join(SCHEDULES)}")
    for key, value in (("parallel.pp", stages), ("parallel.chunks", chunks), ("micro_batches", micro_batches)):
        if value < 1:
            raise ConfigError(key, value, "must be 1 or more")
    _check_chunks(name, chunks)
    order = SCHEDULES[name]
    ranks = tuple(order(stages, chunks, micro_batches, rank) for rank in range(stages))
    return Schedule(name, stages, chunks, micro_batches, ranks)


def _check_chunks(name: str, chunks: int) -> None:
    if name in ("gpipe", "1f1b") and chunks != 1:
        raise ConfigError("parallel.chunks", chunks, f"{name} has 1 chunk a rank", "use parallel.schedule=interleaved")


def _gpipe(stages: int, chunks: int, micro_batches: int, rank: int) -> Order:
    """All forwards, then all backwards. GPipe, Huang et al. 2019, arXiv 1811.06965."""
    forwards = [Action("forward", rank, m) for m in range(micro_batches)]
    return (*forwards, *(Action("backward", rank, m) for m in range(micro_batches)))


def _one_f_one_b(stages: int, chunks: int, micro_batches: int, rank: int) -> Order:
    """One forward for every rank after this one, then forward and backward in turn.

    PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503.
    """
    forwards = [Action("forward", rank, m) for m in range(micro_batches)]
    backwards = [Action("backward", rank, m) for m in range(micro_batches)]
    return _alternate(forwards, backwards, stages - 1 - rank)


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> Order:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


SCHEDULES: dict[str, Callable[[int, int, int, int], Order]] = {"gpipe": _gpipe, "1f1b": _one_f_one_b}
"""Per name, the order of one rank: `(stages, chunks, micro_batches, rank) -> actions`."""
