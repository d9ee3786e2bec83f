"""Bad schedules are refused (trap D27: an order of transfers that deadlocks), and what ranks keep is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from hpctrain.layout.actions import Action, Order, Schedule, ScheduleError, makes
from hpctrain.layout.schedule import make_schedule
from hpctrain.layout.schedule_check import Peak, check, check_programs, one_by_one
from hpctrain.layout.transfers import Exchange, Program, Transfer, expand

Change = Callable[[list[Action]], object]
FORWARD, WHOLE, FIRST, SECOND = (
    Action(kind, 1, 0) for kind in ("forward", "backward", "backward_input", "backward_weight")
)


def changed(name: str, rank: int, change: Change) -> Schedule:
    """A small schedule with the list of one rank changed."""
    schedule = make_schedule(name, 2, 2 if name == "zb-v" else 1, 3)
    ranks = [list(order) for order in schedule.ranks]
    change(ranks[rank])
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def swap(a: int, b: int) -> Change:
    def change(order: list[Action]) -> None:
        order[a], order[b] = order[b], order[a]

    return change


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (
            changed("1f1b", 1, lambda order: order.remove(WHOLE)),
            "micro-batch 0 on stage 1 has 1 forward, 0 backward, 0 backward_input and 0 backward_weight",
        ),
        (
            changed("1f1b", 1, lambda order: order.append(WHOLE)),
            "micro-batch 0 on stage 1 has 1 forward, 2 backward, 0 backward_input and 0 backward_weight",
        ),
        (
            changed("1f1b", 1, lambda order: order.insert(0, FORWARD)),
            "micro-batch 0 on stage 1 has 2 forward, 1 backward, 0 backward_input and 0 backward_weight",
        ),
        (
            changed("zb-h1", 1, lambda order: order.remove(SECOND)),
            "micro-batch 0 on stage 1 has 1 forward, 0 backward, 1 backward_input and 0 backward_weight",
        ),
        (
            changed("zb-h1", 1, lambda order: order.append(WHOLE)),
            "micro-batch 0 on stage 1 has 1 forward, 1 backward, 1 backward_input and 1 backward_weight",
        ),
        (
            changed("1f1b", 1, lambda order: order.append(Action("forward", 1, 3))),
            "there is no such micro-batch: forward of micro-batch 3 on stage 1",
        ),
        (
            changed("1f1b", 0, lambda order: order.append(Action("forward", 1, 0))),
            "rank 0 holds 2 virtual stages and not 1",
        ),
        (
            replace(make_schedule("1f1b", 2, 1, 1), ranks=(make_schedule("1f1b", 2, 1, 1).ranks[0],) * 2),
            "the ranks hold virtual stages [0, 0], each of 2 once",
        ),
        (replace(make_schedule("1f1b", 2, 1, 1), stages=3), "2 lists of actions for 3 ranks"),
        (
            changed("1f1b", 1, swap(0, 1)),
            "rank 0 waits for the gradient of micro-batch 0 from stage 1; "
            "rank 1 waits for the activation of micro-batch 0 from stage 1",
        ),
        (
            changed("zb-h1", 1, lambda order: (order.remove(SECOND), order.insert(0, SECOND))),
            "rank 0 waits for the gradient of micro-batch 0 from stage 1; "
            "rank 1 waits for the gradient of micro-batch 0 from stage 1",
        ),
    ],
)
def test_lists_of_actions(schedule: Schedule, sentence: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        check(schedule)
    assert str(refused.value) == sentence


def test_another_order_than_that_of_a_name_is_a_schedule_too() -> None:
    """One forward fewer before the first backward: slower, with less alive."""
    assert [peak.alive for peak in check(changed("1f1b", 0, swap(1, 2)))] == [2, 1]
    assert [
        peak.alive for peak in check(changed("1f1b", 0, lambda order: order.sort(key=lambda a: a.micro_batch)))
    ] == [
        1,
        1,
    ]


def posted_late(schedule: Schedule, ahead: int) -> tuple[Program, ...]:
    """After each action one exchange: what it made, then the input of the action `ahead` places on."""
    sends = {(t.stage, t.tensor): t for t in transfers(schedule, "send")}
    receives = {(t.stage, t.tensor): t for t in transfers(schedule, "recv")}

    def between(order: Order, place: int) -> Iterator[Transfer]:
        if place >= 0 and (tensor := makes(order[place])) and (order[place].stage, tensor) in sends:
            yield sends[order[place].stage, tensor]
        upto = range(ahead) if place < 0 else range(ahead - 1, ahead)
        for action in (order[place + 1 + i] for i in upto if place + 1 + i < len(order)):
            yield from (receives[action.stage, t] for t in schedule.needs(action) if (action.stage, t) in receives)

    def program(order: Order) -> Iterator[Action | Exchange]:
        for place in range(-1, len(order)):
            if place >= 0:
                yield order[place]
            if posted := tuple(between(order, place)):
                yield Exchange(posted)

    return tuple(tuple(program(order)) for order in schedule.ranks)


def transfers(schedule: Schedule, way: str) -> list[Transfer]:
    exchanges = [item for program in expand(schedule) for item in program if isinstance(item, Exchange)]
    return [transfer for exchange in exchanges for transfer in exchange.transfers if transfer.way == way]


STEADY = make_schedule("1f1b", 2, 1, 3)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (4, 8)])
def test_neighbours_that_both_send_first_deadlock_unless_they_post_both_at_once(
    stages: int, micro_batches: int
) -> None:
    """D27: steady 1F1B with blocking transfers, where each rank sends what it made and then receives what is next."""
    schedule = make_schedule("1f1b", stages, 1, micro_batches)
    programs = posted_late(schedule, ahead=1)
    check_programs(schedule, programs)
    with pytest.raises(ScheduleError) as refused:
        check_programs(schedule, one_by_one(programs))
    if stages == 2:
        assert str(refused.value) == (
            "rank 0 waits to send to rank 1 the activation of micro-batch 1 from stage 0; "
            "rank 1 waits to send to rank 0 the gradient of micro-batch 0 from stage 1"
        )


def test_receives_that_are_all_posted_one_action_early_deadlock() -> None:
    """D27: rank 0 sends the second activation only when it has the first gradient, and rank 1 asks for it before."""
    schedule = make_schedule("1f1b", 2, 1, 4)
    with pytest.raises(ScheduleError, match="rank 0 waits to recv from rank 1 the gradient of micro-batch 0"):
        check_programs(schedule, posted_late(schedule, ahead=2))


def edited(rank: int, edit: Callable[[list[Action | Exchange]], object]) -> tuple[Program, ...]:
    programs = [list(program) for program in one_by_one(expand(STEADY))]
    edit(programs[rank])
    return tuple(map(tuple, programs))


def other_order(items: list[Action | Exchange]) -> None:
    """The first two receives in each other's place."""
    items[0], items[1] = items[1], items[0]


def wrong_peer(items: list[Action | Exchange]) -> None:
    assert isinstance(items[1], Exchange)
    items[1] = Exchange((replace(items[1].transfers[0], peer=0),))


@pytest.mark.parametrize(
    ("programs", "sentence"),
    [
        (
            edited(1, other_order),
            "rank 0 is to send to rank 1 the activation of micro-batch 0 from stage 0 "
            "when rank 1 is to recv from rank 0 the activation of micro-batch 1 from stage 0",
        ),
        (
            edited(1, lambda items: items.insert(0, items.pop(2))),
            "rank 1 lacks the activation of micro-batch 0 from stage 0 for its forward of micro-batch 0 on stage 1",
        ),
        (
            edited(0, lambda items: items.insert(0, items.pop(1))),
            "rank 0 has no activation of micro-batch 0 from stage 0 to send",
        ),
        (edited(0, wrong_peer), "it is not for rank 0 to send to rank 0 the activation of micro-batch 0 from stage 0"),
        (
            edited(1, lambda items: items.pop()),
            "rank 0 waits to recv from rank 1 the gradient of micro-batch 2 from stage 1",
        ),
        (edited(0, lambda items: items.pop()), "rank 0 leaves the gradient of micro-batch 2 from stage 1 unused"),
        (edited(0, lambda items: items.append(items[0])), "rank 0 does not compute what its schedule says"),
    ],
)
def test_lists_with_transfers(programs: tuple[Program, ...], sentence: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        check_programs(STEADY, programs)
    assert str(refused.value) == sentence


def test_peaks_are_counted_by_kind() -> None:
    """In ZB-H1 what the last rank keeps for the gradients of weights is what the first keeps for want of gradients."""
    assert check(make_schedule("gpipe", 2, 1, 3))[0] == Peak(alive=3, whole=3, weights=0, received=2)
    assert check(make_schedule("zb-h1", 3, 1, 4)) == (
        Peak(alive=3, whole=3, weights=0, received=2),
        Peak(alive=3, whole=2, weights=2, received=2),
        Peak(alive=3, whole=1, weights=3, received=2),
    )
