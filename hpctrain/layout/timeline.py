"""A schedule played with given times: when each action starts and ends, and how long ranks are idle."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from hpctrain.layout.actions import Action, Kind, Schedule, ScheduleError, Tensor, makes


@dataclass(frozen=True)
class Times:
    """How long each virtual stage takes for one micro-batch. Any unit of time, one for all.

    Attributes:
        forward, backward_input, backward_weight: one number a virtual stage, in model order.
        latency: from the end of an action to when another rank has what it made.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: float = 0.0

    @classmethod
    def even(
        cls, schedule: Schedule, forward: float = 1, backward_input: float = 1, backward_weight: float = 1
    ) -> Times:
        """Times of a rank's whole share of the model, the same for all ranks and divided evenly over its chunks."""
        whole = (forward, backward_input, backward_weight)
        forwards, inputs, weights = ((time / schedule.chunks,) * schedule.virtual_stages for time in whole)
        return cls(forwards, inputs, weights)

    @cached_property
    def _by_kind(self) -> dict[Kind, tuple[float, ...]]:
        return {
            "forward": self.forward,
            "backward": tuple(map(sum, zip(self.backward_input, self.backward_weight))),
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }

    def of(self, action: Action) -> float:
        """How long an action takes."""
        return self._by_kind[action.kind][action.stage]


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every rank does when, from 0 on."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def end(self) -> float:
        """When the last rank has finished."""
        return max(spans[-1].end for spans in self.ranks)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per rank the time in which it computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Idle part of the time of all ranks, from the step's first action to its last."""
        return 1 - sum(self.busy) / (len(self.ranks) * self.end) if self.end else 0.0

    @property
    def own_bubble(self) -> float:
        """Idle part if ranks need not start and end a step together: the time of a step is then the longest that any
        rank takes from its own first action to its own last. The bubble rate of the zero-bubble papers."""
        longest = max(spans[-1].end - spans[0].start for spans in self.ranks)
        return 1 - sum(self.busy) / (len(self.ranks) * longest) if longest else 0.0


def play(schedule: Schedule, times: Times) -> Timeline:
    """Run every rank's actions in order, each as soon as what it needs is there. Ranks do not wait for their sends.

    Raises:
        ScheduleError: ranks wait for each other for ever, or for what nobody makes.
    """
    made: dict[Tensor, tuple[int, float]] = {}
    waiting: defaultdict[Tensor, list[int]] = defaultdict(list)
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    runnable = list(range(len(schedule.ranks)))
    while runnable:
        rank = runnable.pop()
        order, done = schedule.ranks[rank], spans[rank]
        while len(done) < len(order):
            action = order[len(done)]
            needs = schedule.needs(action)
            missing = [tensor for tensor in needs if tensor not in made]
            if missing:
                waiting[missing[0]].append(rank)
                break
            start = done[-1].end if done else 0.0
            for home, end in map(made.__getitem__, needs):
                start = max(start, end if home == rank else end + times.latency)
            done.append(Span(action, start, start + times.of(action)))
            if tensor := makes(action):
                made[tensor] = (rank, done[-1].end)
                runnable += waiting.pop(tensor, ())
    stuck = [f"rank {rank} waits for the {tensor}" for tensor, ranks in waiting.items() for rank in ranks]
    if stuck:
        raise ScheduleError("; ".join(sorted(stuck)))
    return Timeline(tuple(map(tuple, spans)))
