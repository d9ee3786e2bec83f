"""What buffers hold, for every operation: sizes, consistency between ranks, and that damage is seen."""

from __future__ import annotations

import pytest
import torch

from hpctrain.comms.buffers import POISON, Buffers, allocate, fill, wrong
from hpctrain.comms.formulas import OPERATIONS, counts, partner
from hpctrain.comms.memory import Buffer, Memory
from hpctrain.comms.numpymemory import NumpyMemory
from hpctrain.comms.pattern import EXACT, Block, Contents, busiest, contents, scaled, skewed, values
from hpctrain.comms.sizes import DTYPES, REDUCTIONS
from hpctrain.comms.timing import Stop, average, half_width, percentile, slowest, spread
from hpctrain.comms.torchmemory import TorchMemory

MEMORIES = {"numpy": NumpyMemory(), "torch": TorchMemory(torch.device("cpu"))}


@pytest.fixture(params=MEMORIES)
def memory(request) -> Memory:
    return MEMORIES[request.param]


def filled(blocks: tuple[Block, ...], what, memory: Memory, dtype: str = "float32") -> Buffer:
    data = memory.zeros(sum(block.count for block in blocks), dtype)
    fill(Buffers(data, data, dtype, in_place=True), Contents(blocks, ()), what, memory)
    return data


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_that_is_received_was_sent(operation: str, ranks: int) -> None:
    """Whatever a rank must receive of a rank is among what that rank sends; sizes are those of the formula."""
    count = counts(operation, 960, ranks, 4)
    matrix = scaled(skewed(ranks), 960, 4) if operation == "all_to_all_v" else ()
    every = [contents(operation, count.count, ranks, i, root=ranks - 1, matrix=matrix) for i in range(ranks)]
    for found in every:
        for block in found.receive:
            for source in range(ranks) if block.source is None else [block.source]:
                sent = [(b.start, b.start + b.count) for b in every[source].send]
                assert not block.count or any(a <= block.start and block.start + block.count <= z for a, z in sent)
    largest = max((max(found.sends, found.receives) for found in every), default=0)
    if operation == "all_to_all_v":
        assert largest == busiest(matrix) and 0.9 * 240 <= largest <= 240
    elif operation not in ("ping_pong", "bidirectional") or ranks > 1:
        assert largest * 4 == count.size


def test_partners_of_an_odd_group() -> None:
    assert [partner(i, 5) for i in range(5)] == [1, 0, 3, 2, None]


@pytest.mark.parametrize("ranks", [2, 8, 100, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_are_exact(dtype: str, reduction: str, ranks: int) -> None:
    """Partial results in any order fit the dtype, and a rank that is left out changes some result."""
    made = values("all_reduce", dtype, reduction, ranks)
    kind = getattr(torch, dtype)
    if reduction != "avg":
        for value in (*made.own, *made.reduced):
            assert float(torch.tensor(value, dtype=torch.float64).to(kind)) == value
            assert value <= EXACT.get(dtype, 2**24)
    if reduction in ("sum", "prod", "avg"):
        assert max(made.own) > (1 if reduction == "prod" else 0)
        neutral = 1 if reduction == "prod" else 0
        for rank in range(min(ranks, 10)):
            assert any(made.own[(k + rank) % made.period] != neutral for k in range(made.period))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 7, 8, 14, 56, 300])
def test_a_rank_that_is_lost_while_another_counts_twice_is_seen(memory: Memory, dtype: str, ranks: int) -> None:
    for reduction in ("sum", "prod"):
        what, own = values("all_reduce", dtype, reduction, ranks), (Block(None, 0, 3000),)
        sent = [memory.doubles(filled((Block(r, 0, 3000),), what, memory, dtype), dtype) for r in range(ranks)]
        right = sent[0] * 1
        for other in sent[1:]:
            right = right * other if reduction == "prod" else right + other
        assert right.tolist() == memory.doubles(filled(own, what, memory, dtype), dtype).tolist()
        assert len(set(right.tolist())) > 1, "not the same everywhere"
        assert len({tuple(data.tolist()) for data in sent}) == ranks, "no two ranks send the same"


@pytest.mark.parametrize("ranks", [7, 8, 14, 56, 98, 200])
def test_two_ranks_that_are_swapped_in_a_gather_are_seen(memory: Memory, ranks: int) -> None:
    what = values("all_gather", "int8", "sum", ranks)
    for a, b in {(0, ranks - 1), (0, 97), (0, 7), (1, 194)}:
        if a < b < ranks:
            data = filled((Block(b, 0, 1000), Block(a, 0, 1000)), what, memory, "int8")
            assert wrong(data, (Block(a, 0, 1000), Block(b, 0, 1000)), what, "int8", memory) > 1900


def test_a_mean_has_a_tolerance_and_nothing_else_has() -> None:
    assert values("all_reduce", "float32", "avg", 3).tolerance == 2 * 2**-22
    assert values("all_reduce", "float32", "sum", 3).tolerance == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_damage_is_counted(memory: Memory, dtype: str) -> None:
    what = values("all_gather", dtype, "sum", 2)
    blocks = contents("all_gather", 5000, 2, 0).receive
    data = filled(blocks, what, memory, dtype)

    def lost(rest: Buffer) -> int:
        return wrong(rest, blocks, what, dtype, memory)

    assert lost(data) == 0
    data[4321] += 1
    assert lost(data) == 1
    swapped = memory.zeros(10000, dtype)
    swapped[:5000], swapped[5000:] = data[5000:], data[:5000]
    assert lost(swapped) > 9000
    whole, shifted = filled(blocks, what, memory, dtype), memory.zeros(10000, dtype)
    shifted[1024:], shifted[:1024] = whole[:-1024], whole[-1024:]
    assert lost(shifted) > 9000
    assert POISON not in what.own


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pattern_has_the_same_bytes_in_every_memory(dtype: str) -> None:
    """So what MPI moves is what torch moves: bfloat16 too, which numpy has not."""
    what, blocks = values("all_gather", dtype, "sum", 3), contents("all_gather", 1000, 3, 1).receive
    ours, theirs = (filled(blocks, what, MEMORIES[name], dtype) for name in ("numpy", "torch"))
    assert ours.tobytes() == theirs.view(torch.uint8).numpy().tobytes() and ours.any()
    back = [MEMORIES[name].doubles(data, dtype) for name, data in (("numpy", ours), ("torch", theirs))]
    assert back[0].tolist() == back[1].tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64"])
@pytest.mark.parametrize("reduction", ["sum", "prod", "max", "min", "avg"])
def test_two_become_one_in_every_memory(memory: Memory, dtype: str, reduction: str) -> None:
    into, other = (memory.table(values, dtype) for values in ((3, 1, 4), (2, 7, 1)))
    combine = memory.combine(reduction)
    if reduction == "avg":
        assert combine is None
        return
    combine(into, other)
    assert into.tolist() == {"sum": [5, 8, 5], "prod": [6, 7, 4], "max": [3, 7, 4], "min": [2, 1, 1]}[reduction]


def test_a_mean_may_be_off_by_rounding_and_no_more(memory: Memory) -> None:
    what, blocks = values("all_reduce", "float32", "avg", 3), (Block(None, 0, 50),)
    data = filled(blocks, what, memory)
    data[3], data[4] = data[3] * (1 + what.tolerance / 2), data[4] * (1 + 4 * what.tolerance) + 1
    assert wrong(data, blocks, what, "float32", memory) == 1


def test_pieces_do_not_change_the_pattern(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    what, blocks = values("all_gather", "int64", "sum", 3), contents("all_gather", 1000, 3, 1).receive
    whole = filled(blocks, what, memory, "int64")
    monkeypatch.setattr("hpctrain.comms.buffers.PIECE", 7)
    assert filled(blocks, what, memory, "int64").tolist() == whole.tolist()
    assert wrong(whole, blocks, what, "int64", memory) == 0


def test_in_place_is_the_own_part_of_the_larger_buffer() -> None:
    memory = MEMORIES["torch"]
    for operation, small, large in (("all_gather", "send", "receive"), ("reduce_scatter", "receive", "send")):
        found = allocate(operation, contents(operation, 4, 3, 2), 2, 0, True, "float32", memory)
        part, whole = getattr(found, small), getattr(found, large)
        assert part.numel() == 4 and whole.numel() == 12
        assert part.data_ptr() == whole.data_ptr() + 2 * 4 * 4
    same = allocate("all_reduce", contents("all_reduce", 4, 3, 2), 2, 0, True, "float32", memory)
    assert same.send.data_ptr() == same.receive.data_ptr()
    apart = allocate("all_reduce", contents("all_reduce", 4, 3, 2), 2, 0, False, "float32", memory)
    assert apart.send.data_ptr() != apart.receive.data_ptr()


def test_spread_is_by_nearest_rank_over_the_slowest_ranks() -> None:
    times = [[1.0, 5.0, 2.0], [3.0, 1.0, 2.0]]
    assert slowest(times) == [3.0, 5.0, 2.0]
    found = spread(range(1, 101))
    assert (found.min, found.max, found.p50, found.p95, found.p99, found.mean) == (1, 100, 51, 95, 99, 50.5)
    assert percentile([1.0, 2.0], 99) == 2.0 and percentile([1.0], 50) == 1.0
    assert [average(times, how) for how in ("mean", "max", "min", "rank0")] == pytest.approx([7 / 3, 8 / 3, 2, 8 / 3])


def test_iterations_stop_at_the_target() -> None:
    quiet, noisy = [1.0, 1.001] * 10, [1.0, 2.0] * 10
    assert half_width(quiet) < 0.01 < half_width(noisy)
    stop = Stop(20, confidence=0.01, most=100)
    assert stop.more(0, []) == 20
    assert stop.more(20, [quiet]) == 0
    assert stop.more(20, [quiet, noisy]) == 20
    assert stop.more(80, [noisy]) == 20
    assert stop.more(100, [noisy]) == 0
    assert Stop(20).more(20, [noisy]) == 0
