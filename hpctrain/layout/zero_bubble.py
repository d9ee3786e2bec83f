"""Backwards split in two, so that the gradients of weights fill what would be bubbles."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hpctrain.layout.actions import Action, Order, Schedule, Tensor, makes


def split_backwards(schedule: Schedule) -> Schedule:
    """Split every backward, and place the gradients of weights so that no rank keeps more than the fullest did.

    Qi et al. 2023, arXiv 2401.10241: only the gradient of the input is waited for by others. Here a clock on which
    each part takes 1 tick decides: a rank goes on in its order if it can and may; if the next action's inputs are not
    there yet, or its activations would be one too many, it makes the oldest gradients of weights it still owes.

    Args:
        schedule: of forwards and whole backwards, and without deadlock.
    """
    ranks = [_Rank(order) for order in schedule.ranks]
    allowed = max(rank.peak() for rank in ranks)
    made: set[Tensor] = set()
    while any(rank.ahead or rank.owed for rank in ranks):
        taken = [action for rank in ranks if (action := rank.tick(schedule, made, allowed))]
        assert taken, "without deadlock there is always something to do"
        made.update(tensor for action in taken if (tensor := makes(action)))
    return replace(schedule, ranks=tuple(_rejoin(schedule, rank.done) for rank in ranks))


class _Rank:
    """One rank while its backwards are split: what is ahead, the gradients of weights it owes, what it did."""

    def __init__(self, order: Order) -> None:
        self.ahead = deque(order)
        self.owed: deque[Action] = deque()
        self.done: list[Action] = []
        self.alive = 0

    def peak(self) -> int:
        """Activations alive at once while backwards are whole."""
        alive = most = 0
        for action in self.ahead:
            alive += 1 if action.kind == "forward" else -1
            most = max(most, alive)
        return most

    def tick(self, schedule: Schedule, made: set[Tensor], allowed: int) -> Action | None:
        """What this rank does in one tick; `made` is what was there at its start."""
        action = self.ahead[0] if self.ahead and made.issuperset(schedule.needs(self.ahead[0])) else None
        if action and action.kind == "forward" and self.alive < allowed:
            self.alive += 1
            self.ahead.popleft()
        elif action and action.kind == "backward":
            self.ahead.popleft()
            self.owed.append(Action("backward_weight", action.stage, action.micro_batch))
            action = Action("backward_input", action.stage, action.micro_batch)
        elif self.owed:
            self.alive -= 1
            action = self.owed.popleft()
        else:
            return None
        self.done.append(action)
        return action


def _rejoin(schedule: Schedule, actions: list[Action]) -> Order:
    """Both parts of a backward made one where they follow each other and no other rank waits for the first."""
    order: list[Action] = []
    for action in actions:
        whole = Action("backward", action.stage, action.micro_batch)
        first = Action("backward_input", action.stage, action.micro_batch)
        if action.kind == "backward_weight" and order[-1] == first and _stays(schedule, action.stage):
            order[-1] = whole
        else:
            order.append(action)
    return tuple(order)


def _stays(schedule: Schedule, stage: int) -> bool:
    """Whether the gradient of a stage's input goes to no other rank."""
    return stage == 0 or schedule.home(stage - 1) == schedule.home(stage)
