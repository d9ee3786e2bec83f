"""What ranks send and receive between their computations."""

from __future__ import annotations

from itertools import product

import pytest

from hpctrain.layout.actions import Action, Tensor, makes
from hpctrain.layout.schedule import make_schedule
from hpctrain.layout.timeline import Times, play
from hpctrain.layout.transfers import WAY, Exchange, Program, Transfer, expand, most_received, proofs
from tests.layout.test_schedule import CHUNKS, LETTERS


def short(program: Program) -> str:
    """Actions as letter, stage and micro-batch; exchanges as signs for send and receive, letter, and peer."""

    def one(transfer: Transfer) -> str:
        letter = {"activation": "a", "gradient": "g"}[transfer.tensor.payload]
        sign, micro = {"send": ">", "recv": "<"}[transfer.way], transfer.tensor.micro_batch
        return f"{letter}{transfer.tensor.stage}.{micro}{sign}{transfer.peer}"

    return " ".join(
        f"{LETTERS[item.kind]}{item.stage}.{item.micro_batch}"
        if isinstance(item, Action)
        else f"[{' '.join(map(one, item.transfers))}]"
        for item in program
    )


def transfers(program: Program, way: str) -> list[Transfer]:
    exchanges = [item for item in program if isinstance(item, Exchange)]
    return [transfer for exchange in exchanges for transfer in exchange.transfers if transfer.way == way]


def test_receives_are_early_and_neighbours_exchange_both_ways_at_once_in_steady_1f1b() -> None:
    assert [short(program) for program in expand(make_schedule("1f1b", 3, 1, 5))] == [
        "F0.0 [a0.0>1] F0.1 [a0.1>1] F0.2 [a0.2>1 g1.0<1] B0.0 [g1.1<1] F0.3 [a0.3>1] B0.1 F0.4 [a0.4>1 g1.2<1] "
        "B0.2 [g1.3<1] B0.3 [g1.4<1] B0.4",
        "[a0.0<0] [a0.1<0] F1.0 [a1.0>2] [a0.2<0] F1.1 [a1.1>2 g2.0<2] B1.0 [g1.0>0] [g2.1<2] F1.2 [a1.2>2] B1.1 "
        "[g1.1>0 a0.3<0] [g2.2<2] F1.3 [a1.3>2] [a0.4<0] B1.2 [g1.2>0] F1.4 [a1.4>2 g2.3<2] B1.3 [g1.3>0 g2.4<2] "
        "B1.4 [g1.4>0]",
        "[a1.0<1] [a1.1<1] F2.0 B2.0 [g2.0>1] F2.1 B2.1 [g2.1>1 a1.2<1] F2.2 B2.2 [g2.2>1 a1.3<1] F2.3 [a1.4<1] "
        "B2.3 [g2.3>1] F2.4 B2.4 [g2.4>1]",
    ]


def test_gpipe_receives_the_next_input_while_it_computes() -> None:
    assert short(expand(make_schedule("gpipe", 2, 1, 3))[1]) == (
        "[a0.0<0] [a0.1<0] F1.0 [a0.2<0] F1.1 F1.2 B1.0 [g1.0>0] B1.1 [g1.1>0] B1.2 [g1.2>0]"
    )


def test_stages_of_one_rank_send_nothing() -> None:
    assert all(isinstance(item, Action) for item in expand(make_schedule("interleaved", 1, 3, 2))[0])
    down, turn = expand(make_schedule("zb-v", 2, 2, 1))
    assert short(down) == "F0.0 [a0.0>1 a2.0<1] F3.0 I3.0 [g3.0>1] W3.0 [g1.0<1] B0.0"
    assert short(turn) == "[a0.0<0] F1.0 F2.0 [a2.0>0 g3.0<0] I2.0 I1.0 [g1.0>0] W2.0 W1.0"


def test_a_transfer_names_the_stage_of_its_own_rank() -> None:
    first, second = expand(make_schedule("interleaved", 2, 2, 1))
    activation, gradient = Tensor("activation", 1, 0), Tensor("gradient", 2, 0)
    assert Transfer("send", activation, 1, 0) in transfers(second, "send")
    assert Transfer("recv", activation, 2, 1) in transfers(first, "recv")
    assert Transfer("send", gradient, 2, 1) in transfers(first, "send")
    assert Transfer("recv", gradient, 1, 0) in transfers(second, "recv")


@pytest.mark.parametrize("name", CHUNKS)
def test_both_ends_stand_where_the_tensor_is_made(name: str) -> None:
    """What stands before a transfer has ended when its tensor is made, what follows has not: at both ends."""
    for chunks, stages, micro_batches in product(CHUNKS[name], range(2, 6), range(1, 9)):
        schedule = make_schedule(name, stages, chunks, micro_batches)
        ticks = (1.0,) * schedule.virtual_stages
        played = {
            span.action: span
            for spans in play(schedule, Times(ticks, ticks, ticks, latency=WAY)).ranks
            for span in spans
        }
        made = {makes(action): span.end for action, span in played.items()}
        for program in expand(schedule):
            ends = [played[item].end if isinstance(item, Action) else None for item in program]
            for place, item in enumerate(program):
                for transfer in item.transfers if isinstance(item, Exchange) else ():
                    assert all(end <= made[transfer.tensor] for end in ends[:place] if end)
                    assert all(end > made[transfer.tensor] for end in ends[place:] if end)


@pytest.mark.parametrize("name", CHUNKS)
def test_a_first_exchange_ends_with_what_is_made_or_needed_and_a_second_holds_neither(name: str) -> None:
    for chunks, stages in product(CHUNKS[name], range(2, 6)):
        schedule = make_schedule(name, stages, chunks, 7)
        for program in expand(schedule):
            for place, (before, item, after) in enumerate(zip((None, *program), program, (*program[1:], None))):
                if not isinstance(item, Exchange):
                    continue
                later = [x for x in program[place:] if isinstance(x, Action)]
                needs = schedule.needs(later[0]) if later else ()
                wanted = [t.way == "send" or t.tensor in needs for t in item.transfers]
                assert wanted[-1] or not any(wanted)
                assert wanted[-1] or not isinstance(after, Exchange)
                assert not (isinstance(before, Exchange) and any(wanted))


def test_what_a_tensor_proves_by_hand() -> None:
    """1F1B of 3: rank 0 sends its 4th input after the first gradient, the other way each gradient names its input."""
    schedule = make_schedule("1f1b", 3, 1, 5)
    a0, a1, g1, g2 = (
        [Tensor(payload, stage, m) for m in range(5)]
        for payload, stage in (("activation", 0), ("activation", 1), ("gradient", 1), ("gradient", 2))
    )
    forward = {a0[0]: (), a0[1]: (), a0[2]: (), a0[3]: (g1[0],), a0[4]: (g1[1],)}
    assert proofs(schedule, expand(schedule), 1) == forward | {g2[m]: (a1[m],) for m in range(5)}


@pytest.mark.parametrize("name", CHUNKS)
def test_an_activation_has_arrived_when_its_gradient_has(name: str) -> None:
    """So a rank keeps what it has sent no longer than the pass that made it; and nothing is proved twice."""
    for stages, chunks, micro_batches in product((2, 3, 4), CHUNKS[name], (1, 3, 8)):
        schedule = make_schedule(name, stages, chunks, micro_batches)
        programs = expand(schedule)
        for rank, program in enumerate(programs):
            proved: list[Tensor] = []
            found = proofs(schedule, programs, rank)
            received = [transfer.tensor for transfer in transfers(program, "recv")]
            assert sorted(found) == sorted(received)
            for tensor in received:
                proved += found[tensor]
                if tensor.payload == "gradient":
                    assert Tensor("activation", tensor.stage - 1, tensor.micro_batch) in proved
            sent = {transfer.tensor for transfer in transfers(program, "send")}
            assert len(proved) == len(set(proved)) and sent >= set(proved)


@pytest.mark.parametrize("name", CHUNKS)
def test_few_tensors_are_received_for_later(name: str) -> None:
    found = {}
    for stages, chunks, micro_batches in product((1, 2, 5, 8), CHUNKS[name], (1, 2, 7, 8, 16)):
        schedule = make_schedule(name, stages, chunks, micro_batches)
        room = most = 0
        for rank, program in enumerate(expand(schedule)):
            for item in program:
                if isinstance(item, Exchange):
                    room += sum(transfer.way == "recv" for transfer in item.transfers)
                else:
                    others = (t for t in schedule.needs(item) if t.stage != item.stage)
                    room -= sum(schedule.home(t.stage) != rank for t in others)
                most = max(most, room)
        assert most <= most_received(stages, chunks)
        found[stages, chunks] = max(most, found.get((stages, chunks), 0))
    if chunks == 1:  # of schedules that only ever have one
        assert found[2, 1] == found[8, 1] == most_received(8, 1)
