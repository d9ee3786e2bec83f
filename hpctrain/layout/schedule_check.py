"""Proof of a schedule: it is complete, and no rank waits for ever even if every send and receive blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from hpctrain.layout.actions import Action, Schedule, ScheduleError, Tensor, makes
from hpctrain.layout.transfers import Exchange, Program, Transfer, expand


@dataclass(frozen=True)
class Peak:
    """The most that a rank keeps at once, each in activations of one micro-batch on one virtual stage.

    Attributes:
        alive: forward has run, backward is not complete. The claims of `schedule_claims` are about these.
        whole: of these, such as still need all of their activations: no part of their backward has run.
        weights: of these, such as need only what the gradients of weights need: `backward_input` has run.
        received: inputs and gradients that were received and wait for their action.
    """

    alive: int
    whole: int
    weights: int
    received: int


def check(schedule: Schedule) -> tuple[Peak, ...]:
    """Prove a schedule, and say what each rank keeps at most.

    Raises:
        ScheduleError: something is missing, double or in the wrong place, or ranks wait for each other for ever.
    """
    check_complete(schedule)
    programs = expand(schedule)
    check_programs(schedule, one_by_one(programs))  # what runs so runs with whole exchanges too: more is posted early
    return tuple(peak(schedule, program) for program in programs)


def check_complete(schedule: Schedule) -> None:
    """Every micro-batch passes every virtual stage once forward and once, whole or in two parts, backward.

    Raises:
        ScheduleError: it does not, or a stage is on two ranks, or a rank holds more or fewer stages than others.
    """
    if len(schedule.ranks) != schedule.stages:
        raise ScheduleError(f"{len(schedule.ranks)} lists of actions for {schedule.stages} ranks")
    for rank, held in enumerate(schedule.held):
        if len(held) != schedule.chunks:
            raise ScheduleError(f"rank {rank} holds {len(held)} virtual stages and not {schedule.chunks}")
    stages = [stage for held in schedule.held for stage in held]
    if sorted(stages) != list(range(schedule.virtual_stages)):
        raise ScheduleError(f"the ranks hold virtual stages {sorted(stages)}, each of {schedule.virtual_stages} once")
    found = Counter(action for order in schedule.ranks for action in order)
    for stage in stages:
        for micro_batch in range(schedule.micro_batches):
            forward, whole, first, second = (
                found.pop(Action(kind, stage, micro_batch), 0)
                for kind in ("forward", "backward", "backward_input", "backward_weight")
            )
            if forward != 1 or (whole, first, second) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"micro-batch {micro_batch} on stage {stage} has {forward} forward, {whole} backward, "
                    f"{first} backward_input and {second} backward_weight"
                )
    if found:
        raise ScheduleError(f"there is no such micro-batch: {next(iter(found))}")


def check_programs(schedule: Schedule, programs: tuple[Program, ...]) -> None:
    """Run lists of actions and exchanges: a rank stays at an exchange until all of its transfers are done, and a
    transfer is done when both of its ends are there. The sends of one rank to another meet its receives in order.

    Raises:
        ScheduleError: an action lacks an input, a receive would get another tensor than it is for, or ranks wait for
            each other for ever.
    """
    ranks = [_Rank(*of_rank) for of_rank in zip(range(schedule.stages), repeat(schedule), programs)]
    runnable = list(ranks)
    while runnable:
        rank = runnable.pop()
        for transfer in rank.advance():
            runnable += _meet(ranks, rank, transfer)
    stuck = [f"rank {rank.rank} waits to {rank.open[0]}" for rank in ranks if rank.open]
    if stuck:
        raise ScheduleError("; ".join(stuck))
    for rank in ranks:
        if tuple(rank.computed) != schedule.ranks[rank.rank] or rank.unused:
            what = f"leaves the {min(rank.unused)} unused" if rank.unused else "does not compute what its schedule says"
            raise ScheduleError(f"rank {rank.rank} {what}")


class _Rank:
    """One rank on its way through its program."""

    def __init__(self, rank: int, schedule: Schedule, program: Program) -> None:
        self.rank, self.schedule = rank, schedule
        self.items = iter(program)
        self.computed: list[Action] = []
        self.open: list[Transfer] = []
        self.there: set[Tensor] = set()
        self.unused: set[Tensor] = set()

    def advance(self) -> tuple[Transfer, ...]:
        """Compute up to the next exchange and post it; what was posted, nothing while one is open or at the end."""
        for item in self.items if not self.open else ():
            if isinstance(item, Exchange):
                self.open = [self.checked(transfer) for transfer in item.transfers]
                return item.transfers
            self.compute(item)
        return ()

    def checked(self, transfer: Transfer) -> Transfer:
        """A transfer that is this rank's, of a tensor that it has if it is to send it."""
        source, target = transfer.tensor.stage, self.schedule.target(transfer.tensor)
        near, far = (source, target) if transfer.way == "send" else (target, source)
        homes = tuple(None if end is None else self.schedule.home(end) for end in (near, far))
        if transfer.stage != near or homes != (self.rank, transfer.peer) or self.rank == transfer.peer:
            raise ScheduleError(f"it is not for rank {self.rank} to {transfer}")
        if transfer.way == "send" and transfer.tensor not in self.there:
            raise ScheduleError(f"rank {self.rank} has no {transfer.tensor} to send")
        return transfer

    def compute(self, action: Action) -> None:
        needs = self.schedule.needs(action)
        missing = [tensor for tensor in needs if tensor not in self.there]
        if missing:
            raise ScheduleError(f"rank {self.rank} lacks the {missing[0]} for its {action}")
        self.unused.difference_update(needs)
        self.computed.append(action)
        if tensor := makes(action):
            self.there.add(tensor)

    def close(self, transfer: Transfer) -> None:
        """A transfer is done."""
        self.open.remove(transfer)
        if transfer.way == "recv":
            self.there.add(transfer.tensor)
            self.unused.add(transfer.tensor)


def _meet(ranks: list[_Rank], rank: _Rank, transfer: Transfer) -> list[_Rank]:
    """Let a posted transfer meet what its peer has posted; the ranks that can go on after that."""
    peer = ranks[transfer.peer]
    facing = "recv" if transfer.way == "send" else "send"
    first = next(t for t in rank.open if (t.way, t.peer) == (transfer.way, transfer.peer))
    other = next((t for t in peer.open if (t.way, t.peer) == (facing, rank.rank)), None)
    if other is None:
        return []
    if other.tensor != first.tensor:
        raise ScheduleError(f"rank {rank.rank} is to {first} when rank {peer.rank} is to {other}")
    rank.close(first)
    peer.close(other)
    return [end for end in (rank, peer) if not end.open]


def one_by_one(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """The same lists with every transfer in an exchange of its own."""
    return tuple(tuple(_split(program)) for program in programs)


def _split(program: Program) -> Iterator[Action | Exchange]:
    for item in program:
        if isinstance(item, Exchange):
            yield from (Exchange((transfer,)) for transfer in item.transfers)
        else:
            yield item


def peak(schedule: Schedule, program: Program) -> Peak:
    """What a rank keeps at most on its way through its program; a receive counts from where it is posted."""
    whole, weights = 0, 0
    received: set[Tensor] = set()
    seen = []
    for item in program:
        if isinstance(item, Exchange):
            received.update(transfer.tensor for transfer in item.transfers if transfer.way == "recv")
            seen.append((whole + weights, whole, weights, len(received)))
            continue
        whole += {"forward": 1, "backward_weight": 0}.get(item.kind, -1)
        weights += {"backward_input": 1, "backward_weight": -1}.get(item.kind, 0)
        seen.append((whole + weights, whole, weights, len(received)))
        received.difference_update(schedule.needs(item))
    return Peak(*map(max, zip(*seen)))
