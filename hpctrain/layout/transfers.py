"""What ranks of a pipeline send and receive, and when, as plain data made from their lists of computations.

`expand` plays a schedule on a clock where every forward, backward_input and backward_weight takes 1 tick. A tensor for
another rank is sent at the tick its action ends and received by the other in the same tick. All that a rank sends and
receives in one tick is one exchange, made to be posted in one `batch_isend_irecv`: at the end of a steady 1F1B tick two
neighbours send to each other, and both ways should be under way at once.

A list places an exchange after the actions that end by its tick and before those that end later. So a send follows its
action directly, and a receive whose rank is computing at that tick stands before the action that is under way: posted
there, the tensor arrives while the rank computes.

How to run a list: go through it; at an exchange post all its transfers, in the order given, and do not wait; before
an action wait for the receives that bring its inputs. Why this cannot deadlock, however long anything really takes:
actions by the tick they end, with the transfers in between, are one order of everything on all ranks, and each list is
a part of it. Whatever is first in that order among what is not done can always go on. That holds even if every send
and receive blocks until its other end is there, even if the transfers of an exchange are posted one by one, and also
if a rank's exchanges run one after another beside its computations, as NCCL runs them on one communicator. For the
same reason a rank receives what another sends it in the order in which it is sent, so tags are not needed.
"""

from __future__ import annotations

from collections import defaultdict
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


def expand(schedule: Schedule) -> tuple[Program, ...]:
    """Per rank its actions with the exchanges in between.

    Nothing is sent between virtual stages of one rank.

    Raises:
        ScheduleError: the lists of actions alone wait for each other for ever.
    """
    ticks = (1.0,) * schedule.virtual_stages
    timeline = play(schedule, Times(ticks, ticks, ticks))
    ends = sorted(
        (span.end, rank, step) for rank, spans in enumerate(timeline.ranks) for step, span in enumerate(spans)
    )
    exchanges: list[dict[float, list[Transfer]]] = [defaultdict(list) for _ in schedule.ranks]
    for end, rank, step in ends:
        tensor = makes(schedule.ranks[rank][step])
        target = schedule.target(tensor) if tensor else None
        if tensor is None or target is None or schedule.home(target) == rank:
            continue
        exchanges[rank][end].append(Transfer("send", tensor, tensor.stage, schedule.home(target)))
        exchanges[schedule.home(target)][end].append(Transfer("recv", tensor, target, rank))
    programs: list[list[tuple[float, bool, Action | Exchange]]] = [
        [(end, True, Exchange(tuple(transfers))) for end, transfers in of_rank.items()] for of_rank in exchanges
    ]
    for end, rank, step in ends:
        programs[rank].append((end, False, schedule.ranks[rank][step]))
    return tuple(tuple(item for *_, item in sorted(program, key=lambda p: p[:2])) for program in programs)
