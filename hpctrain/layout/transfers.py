"""What ranks of a pipeline send and receive, and when, as plain data made from their lists of computations.

`expand` plays a schedule on a clock where every forward, backward_input and backward_weight takes 1 tick and a tensor
is a small part of one on its way (`WAY`). Both ends of a transfer stand in their lists at the moment its tensor is
made: after the actions that have ended by then, before those that have not. So a send follows its action directly; and
where the other rank is computing at that moment, it posts the receive before the action that is under way, so that the
tensor arrives while it computes.

All that stands between two actions is posted in two exchanges at most, each made for one `batch_isend_irecv`: first
what was made and what the next action needs, which between neighbours in steady 1F1B go both ways at once; then
receives for later, for which the next action need not wait.

How to run a list: go through it; at an exchange post all its transfers, in the order given, and do not wait; before
an action wait for the receives that bring its inputs. Why this cannot deadlock, however long anything really takes:
actions by the moment they end, with the transfers in between, are one order of everything on all ranks, and each list
is a part of it. Whatever is first in that order among what is not done can always go on. That holds even if every send
and receive blocks until its other end is there, even if the transfers of an exchange are posted one by one, and also
if a rank's exchanges run one after another beside its computations, as NCCL runs them on one communicator. For the
same reason a rank receives what another sends it in the order in which it is sent, so tags are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.layout.actions import Action, Schedule, Tensor, makes
from hpctrain.layout.timeline import Times, play


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a tensor's way from one rank to another.

    Attributes:
        way: whether this rank sends it or receives it.
        tensor: what is sent; `tensor.stage` is the virtual stage that made it, the same at both ends.
        stage: the virtual stage of this rank that made it, or that takes it in.
        peer: the rank of the pp axis at the other end.
    """

    way: Literal["send", "recv"]
    tensor: Tensor
    stage: int
    peer: int

    def __str__(self) -> str:
        return f"{self.way} {'to' if self.way == 'send' else 'from'} rank {self.peer} the {self.tensor}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers that a rank posts together."""

    transfers: tuple[Transfer, ...]


Program = tuple[Action | Exchange, ...]


WAY = 1 / 64
"""Ticks that a tensor is on its way: the time of a transfer by that of a forward, roughly, and exact in binary."""


def expand(schedule: Schedule) -> tuple[Program, ...]:
    """Per rank its actions with the exchanges in between.

    Nothing is sent between virtual stages of one rank.

    Raises:
        ScheduleError: the lists of actions alone wait for each other for ever.
    """
    ticks = (1.0,) * schedule.virtual_stages
    timeline = play(schedule, Times(ticks, ticks, ticks, latency=WAY))
    ends = [(span.end, rank, span.action) for rank, spans in enumerate(timeline.ranks) for span in spans]
    items: list[list[tuple[float, Action | Transfer]]] = [[] for _ in schedule.ranks]
    for end, rank, action in ends:
        items[rank].append((end, action))
    for end, rank, action in sorted(ends, key=lambda e: e[:2]):
        tensor = makes(action)
        target = schedule.target(tensor) if tensor else None
        if tensor is None or target is None or schedule.home(target) == rank:
            continue
        items[rank].append((end, Transfer("send", tensor, tensor.stage, schedule.home(target))))
        items[schedule.home(target)].append((end, Transfer("recv", tensor, target, rank)))
    return tuple(_program(schedule, [item for _, item in sorted(of_rank, key=lambda i: i[0])]) for of_rank in items)


def most_received(stages: int, chunks: int) -> int:
    """Tensors that a rank has room for at once, at most: those that it uses next, and for later. No tensor waits for
    long in a list made by `expand`, so this does not grow with the size of the schedule."""
    return 0 if stages == 1 else 2 if chunks == 1 else 6


def proofs(schedule: Schedule, programs: Sequence[Program], rank: int) -> dict[Tensor, tuple[Tensor, ...]]:
    """For each tensor that a rank receives: those it had sent to the same rank that must have arrived by then.

    They are what the other rank has used before it sent the tensor, and after it sent the one before.
    """
    found: dict[Tensor, tuple[Tensor, ...]] = {}
    for peer, program in enumerate(programs):
        used: list[Tensor] = []
        for item in program if peer != rank else ():
            if isinstance(item, Action):
                needs = (tensor for tensor in schedule.needs(item) if tensor.stage != item.stage)
                used += [tensor for tensor in needs if schedule.home(tensor.stage) == rank]
                continue
            for transfer in item.transfers:
                if transfer.way == "send" and transfer.peer == rank:
                    found[transfer.tensor], used = tuple(used), []
    return found


def _program(schedule: Schedule, items: list[Action | Transfer]) -> Program:
    """Put the transfers between two actions together: up to the last that the next action needs, and the others."""
    program: list[Action | Exchange] = []
    waiting: list[Transfer] = []
    for item in items:
        if isinstance(item, Transfer):
            waiting.append(item)
            continue
        needs = schedule.needs(item)
        now = max((i for i, t in enumerate(waiting, 1) if t.way == "send" or t.tensor in needs), default=0)
        program += [Exchange(tuple(part)) for part in (waiting[:now], waiting[now:]) if part]
        program.append(item)
        waiting = []
    return (*program, Exchange(tuple(waiting))) if waiting else tuple(program)
