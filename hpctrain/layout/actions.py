"""What a pipeline schedule is made of, and what each computation needs and makes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
Payload = Literal["activation", "gradient"]


class ScheduleError(ValueError):
    """Lists of actions that are not a schedule: something missing, out of order, or waiting for ever."""


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one micro-batch on one virtual stage.

    `backward` is the whole of it; `backward_input` makes the gradient of the stage's input and leaves the
    gradients of its weights to a later `backward_weight`.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


class Tensor(NamedTuple):
    """What a computation hands on: a stage's output, or the gradient of its input."""

    payload: Payload
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.payload} of micro-batch {self.micro_batch} from stage {self.stage}"


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

    @property
    def virtual_stages(self) -> int:
        """Parts the model is cut into."""
        return self.stages * self.chunks

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

    def needs(self, action: Action) -> tuple[Tensor, ...]:
        """What has to be there before an action can run: first what its own stage made, then its neighbour's."""
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind == "forward":
            return (Tensor("activation", stage - 1, micro_batch),) if stage else ()
        if action.kind == "backward_weight":
            return (Tensor("gradient", stage, micro_batch),)
        own = Tensor("activation", stage, micro_batch)
        return (own,) if stage == self.virtual_stages - 1 else (own, Tensor("gradient", stage + 1, micro_batch))

    def target(self, tensor: Tensor) -> int | None:
        """The virtual stage a tensor goes to; None for the last stage's output and the first stage's gradient."""
        stage = tensor.stage + (1 if tensor.payload == "activation" else -1)
        return stage if 0 <= stage < self.virtual_stages else None


def makes(action: Action) -> Tensor | None:
    """What an action hands on; nothing for `backward_weight`."""
    if action.kind == "backward_weight":
        return None
    return Tensor("activation" if action.kind == "forward" else "gradient", action.stage, action.micro_batch)
