"""Every operation on real ranks: results are right, damage is seen, groups have their own size."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from hpctrain.comms import clock, measure
from hpctrain.comms.backend import nothing
from hpctrain.comms.formulas import ALGORITHMS, OPERATIONS
from hpctrain.comms.rank import measured as measured_by
from hpctrain.comms.result import BenchError, Result, check
from hpctrain.comms.spec import Spec
from hpctrain.errors import ConfigError
from hpctrain.launch.local.zygote import RankFailure
from tests.comms.runs import party as party_of_ranks
from tests.comms.runs import run

SMALL = dict(warm_up=0, iterations=2, checks=2)


def measured(ranks, world: int, **settings) -> Result:
    found = [Result.of(plain) for plain in ranks(world, run, Spec(**{**SMALL, **settings}).plain())]
    assert all(other.rows == found[0].rows for other in found)
    return found[0]


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_is_right(ranks, world: int) -> None:
    result = measured(ranks, world, operations=tuple(OPERATIONS), sizes=(8, 5000))
    assert {row.operation for row in result.rows} == set(OPERATIONS)
    for row in result.rows:
        assert (row.checked, row.wrong) == ((0, 0) if row.operation == "barrier" else (2, 0)), row
        assert len(row.times) == world and all(len(times) == 2 and min(times) > 0 for times in row.times)
        assert (row.busbw is None) == (row.operation == "barrier")
    assert {row.placement for row in result.rows if row.operation == "all_gather"} == {"in_place", "out_of_place"}


def with_a_clock_of_its_own(plain):
    def seconds(act, iterations: int) -> list[float]:
        for _ in range(iterations):
            act()
        return [0.0 if act is nothing else 2.0] * iterations

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "timed", seconds)
        return run(plain)


def test_a_ping_pong_takes_half_a_round_trip(ranks) -> None:
    """As its busbw, and the time of a send that a profile makes of it, want."""
    plain = Spec(**SMALL, operations=("ping_pong", "sendrecv"), sizes=(1000,)).plain()
    for world in (2, 3):  # the third is idle
        rows = Result.of(ranks(world, with_a_clock_of_its_own, plain)[0]).rows
        assert {row.operation: row.seconds for row in rows} == {"ping_pong": 1.0, "sendrecv": 2.0}


def test_dtypes_reductions_and_roots(ranks) -> None:
    result = measured(
        ranks,
        2,
        operations=("all_reduce", "reduce", "broadcast"),
        sizes=(1024,),
        dtypes=("float16", "bfloat16", "int8", "int64", "float64"),
        reductions=("sum", "prod", "max", "min"),
        root=1,
    )
    assert len(result.rows) == 5 * (4 + 4 + 1) and not result.damaged
    assert {row.root for row in result.rows if row.operation != "all_reduce"} == {1}
    means = measured(ranks, 2, sizes=(1024,), dtypes=("float32", "bfloat16"), reductions=("avg",))
    assert [row.wrong for row in means.rows] == [0, 0]


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_algorithms_of_ours_are_right(ranks, world: int) -> None:
    names = tuple(a for a in ALGORITHMS)
    result = measured(ranks, world, algorithms=names, sizes=(4, 1000), reductions=("sum", "max"))
    assert [(row.algorithm, row.wrong) for row in result.rows] == [(name, 0) for name in names for _ in range(4)]


def hierarchy(size: int, inner: int) -> list[float]:
    """Nodes of `inner` ranks, which one machine has not."""
    import torch
    import torch.distributed as dist

    from hpctrain.comms.algorithms import algorithm
    from hpctrain.comms.backend import Task
    from hpctrain.comms.buffers import Buffers
    from hpctrain.comms.torchbackend import TorchParty

    party = TorchParty(None, "gloo", torch.device("cpu"), 60.0)
    data = torch.arange(size, dtype=torch.float64) * (dist.get_rank() + 1)
    group = party.groups([tuple(range(party.world))])
    buffers = Buffers(data, data, "float64", in_place=True)
    algorithm("hierarchical", group, Task("all_reduce", buffers, size), party.memory, inner)()
    return data.tolist()


@pytest.mark.parametrize("size", [3, 17])
def test_hierarchy_of_two_nodes(ranks, size: int) -> None:
    assert ranks(4, hierarchy, size, 2) == [[10.0 * i for i in range(size)]] * 4


def breaking(plain, calls: int):
    """An operation of which two elements go wrong on rank 1 after so many calls."""
    from hpctrain.comms.torchbackend import TorchGroup

    whole = TorchGroup.call

    def call(self, task):
        act, done = whole(self, task), []

        def broken() -> None:
            act()
            done.append(1)
            if len(done) > calls and self.index == 1:
                task.buffers.receive[:2] += 1

        return broken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGroup, "call", call)
        return run(plain)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "broadcast"])
def test_what_goes_wrong_in_the_timed_calls_is_seen(ranks, operation: str) -> None:
    """Two results are checked before and nothing is wrong with them; the third is what the tenth timed call left."""
    plain = Spec(operations=(operation,), sizes=(4096,), checks=3, warm_up=1, iterations=10).plain()
    for calls, wrong in ((2 + 1 + 5, 1), (100, 0)):
        rows = Result.of(ranks(2, breaking, plain, calls)[0]).rows
        assert [(row.checked, row.wrong, row.elements) for row in rows] == [(3, wrong, 2 * wrong)] * len(rows)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_what_goes_wrong_beside_products_is_seen(ranks, operation: str) -> None:
    plain = Spec(kind="overlap", operations=(operation,), sizes=(4096,), warm_up=1, iterations=2).plain()
    lost = [ranks(2, breaking, plain, calls)[0]["extra"]["lines"][0]["wrong"] for calls in (5, 1000)]
    assert lost == [2, 0]


def slowly(folder, plain):
    """Calls of 10 ms, between ranks that wait for each other for half a second and 2 s of grace at the most."""
    import os

    import torch.distributed as dist

    from hpctrain.comms.torchbackend import torch_party
    from hpctrain.launch.life.identity import Identity
    from hpctrain.launch.meet.watchdog import Watchdog
    from hpctrain.launch.rank import bootstrap

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    timed = clock.timed

    def seconds(act, iterations: int) -> list[float]:
        def slow() -> None:
            act()
            if act is not nothing:
                time.sleep(0.01)

        return timed(slow, iterations)

    def watchdog(store, rank, world, meter, timeout_s, *rest) -> Watchdog:
        return Watchdog(store, rank, world, meter, Spec.of(plain).timeout_s, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "timed", seconds)
        patch.setattr(bootstrap, "Watchdog", watchdog)
        with torch_party(Identity(rank, world, rank, world, "srun", "slow"), folder, "gloo", 60.0, 1) as party:
            return measured_by(Spec.of(plain), party).plain()


def test_the_limit_is_of_a_wait_and_not_of_a_test(ranks, tmp_path) -> None:
    """A healthy test that takes many times as long as a wait may, with a rank that has nothing to do meanwhile."""
    settings = dict(operations=("ping_pong",), iterations=300, warm_up=0, checks=0, timeout_s=0.5)
    (row,) = Result.of(ranks(3, slowly, tmp_path, Spec(**settings).plain())[0]).rows
    assert sum(row.iterations) * 2 > 3.0 and [len(times) for times in row.times] == [300] * 3


def test_turns_take_a_share_of_the_limit() -> None:
    turns = clock.Turns(None, 8.0)  # type: ignore[arg-type]
    assert turns.next(100) == 1, "nothing is known yet"
    turns.took([[0.125], [0.0625], []])
    assert turns.next(100) == 8 and turns.next(3) == 3
    turns.took([[0.5, 0.25]])
    assert turns.next(100) == 2
    turns.took([[3.0]])
    assert turns.next(100) == 1
    turns.took([[0.125]])
    assert turns.next(100) == 8, "one slow call, as the first of a connection, is not for ever"


def test_a_replay_of_a_graph_is_many_calls() -> None:
    """A single one may take as long as a wait, and no longer."""
    turns = clock.Turns(None, 8.0)  # type: ignore[arg-type]
    turns.took([[0.03125]])
    assert turns.next(100, each=4) == 8 and turns.next(100) == 32
    turns.took([[0.5]], each=4)
    assert turns.next(100, each=4) == 2 and turns.next(100) == 8
    assert turns.next(100, each=64) == 1
    with pytest.raises(ConfigError, match=r"--graph=128: one replay takes some 16 s, and a wait may take 8 s; capture"):
        turns.next(100, each=128)


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("graph", [0, 4])
def test_a_gpu_has_barriers_and_graphs_too(monkeypatch, barrier: bool, graph: int) -> None:
    """Without a GPU: which of its clocks is asked for what."""
    stand_in = SimpleNamespace(
        graphed=lambda act, calls: f"{calls} {act}",
        timed_events=lambda act, n: ("apace", act, n),
        timed_events_apart=lambda act, barrier, n: ("apart", act, barrier, n),
    )
    monkeypatch.setitem(sys.modules, "hpctrain.comms.cuda", stand_in)
    spec = Spec(backend="nccl", barrier=barrier, graph=graph)
    found = clock.clock_of(SimpleNamespace(kind="cuda"), spec, "act", "barrier")(7)  # type: ignore[arg-type]
    act = f"{graph} act" if graph else "act"
    assert found == (("apart", act, "barrier", 7) if barrier else ("apace", act, 7))


def with_graphs(plain) -> tuple[dict[str, object], list[str]]:
    """As on a GPU: to capture calls is one call, and each replay makes them all."""
    party, done = party_of_ranks(), []

    def graphed(act, calls: int):
        act()
        done.append("captured")

        def replay() -> None:
            for _ in range(calls):
                act()

        return replay

    def seconds(act, iterations: int) -> list[float]:
        done.append(f"{iterations} replays" if act.__name__ == "replay" else "calls")
        return clock.timed(act, iterations)

    def clock_of(memory, spec, act, barrier):
        return clock.clock_of(SimpleNamespace(kind="cuda"), spec, act, barrier)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "clock_of", clock_of)
        stand_in = SimpleNamespace(graphed=graphed, timed_events=seconds, timed_events_apart=None)
        patch.setitem(sys.modules, "hpctrain.comms.cuda", stand_in)
        return measured_by(Spec.of(plain), party).plain(), done


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_results_of_a_graph_are_right_and_its_first_replay_does_not_count(ranks, operation: str) -> None:
    plain = Spec(backend="nccl", operations=(operation,), sizes=(4096,), graph=3, iterations=2, checks=2).plain()
    for made, done in ranks(2, with_graphs, plain):
        rows = Result.of(made).rows
        assert rows and all((row.checked, row.wrong, len(row.times[0])) == (2, 0, 2) for row in rows)
        assert done[:2] == ["captured", "1 replays"] and done[2].endswith("replays")


def with_slow_graphs(plain) -> dict[str, object]:
    """A replay takes six seconds."""

    def clock_of(memory, spec, act, barrier):
        return lambda calls: [act() or 6.0 for _ in range(calls * spec.graph)][:calls]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "clock_of", clock_of)
        return measured_by(Spec.of(plain), party_of_ranks()).plain()


def test_a_time_is_of_one_call_of_a_graph(ranks) -> None:
    plain = Spec(backend="nccl", operations=("all_gather",), sizes=(4096,), graph=3, iterations=2, checks=1).plain()
    rows = Result.of(ranks(2, with_slow_graphs, plain)[0]).rows
    assert [set(times) for row in rows for times in row.times] == [{2.0}] * 4


def test_a_barrier_is_of_the_ranks_that_call(ranks) -> None:
    """Not of those in no group, which would be waited for."""
    rows = measured(ranks, 3, groups=("0,2",), barrier=True, sizes=(64,), warm_up=1).rows
    assert [(row.ranks, row.wrong, len(row.times[0])) for row in rows] == [((0, 2), 0, 2)]


def groups_apart() -> tuple[bool, bool, list[float]]:
    from tests.comms.runs import party

    both = party()
    one, other = both.groups([(0, 1)]), both.groups([(0, 1)], apart=True)
    return one is other, both.groups([(0, 1)]) is one, [1.0]


def test_groups_that_are_used_at_once_are_two(ranks) -> None:
    assert ranks(2, groups_apart) == [(False, True, [1.0])] * 2


def test_groups_run_at_once_with_their_own_size(ranks) -> None:
    result = measured(ranks, 4, groups=("tp", "dp", "world", "0,3"), layout="tp=2", sizes=(4096,))
    assert [(row.groups, row.ranks) for row in result.rows] == [
        *(("tp", (0, 1)), ("tp", (2, 3)), ("dp", (0, 2)), ("dp", (1, 3))),
        *(("world", (0, 1, 2, 3)), ("0,3", (0, 3))),
    ]
    for row in result.rows:
        assert row.busbw == pytest.approx(row.algbw * (1.5 if row.groups == "world" else 1.0))
        assert row.wrong == 0


def test_iterations_go_on_until_the_target(ranks) -> None:
    rows = measured(ranks, 2, sizes=(8,), confidence=1e-9, iterations=300).rows
    assert [len(times) for times in rows[0].times] == [2000] * 2


def test_injected_wrong_results_are_counted_by_size(ranks) -> None:
    """Every third result of rank 1 from 4 KiB on is wrong in one element; it is reported with size and rate."""
    fault = {"kind": "wrong", "rank": 1, "size": 4096, "every": 3}
    result = measured(ranks, 2, sizes=(1024, 4096, 8192), checks=6, fault=fault)
    assert [(row.size, row.checked, row.wrong, row.elements, row.rate) for row in result.rows] == [
        (1024, 6, 0, 0, 0.0),
        (4096, 6, 2, 2, 1 / 3),
        (8192, 6, 2, 2, 1 / 3),
    ]
    with pytest.raises(BenchError, match=r"all_reduce of 4096 bytes .*: 2 of 6 results, 2 elements; .* 8192 bytes"):
        check(result)


def test_a_matrix_of_an_uneven_all_to_all(ranks) -> None:
    row = measured(ranks, 2, operations=("all_to_all_v",), weights="1 3/0 2", sizes=(4000,)).rows[0]
    assert (row.size, row.wrong) == (4000, 0)
    assert row.seconds == max(sum(times) / 2 for times in row.times)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(backend="smoke"), "--backend='smoke': must be one of nccl, gloo, mpi."),
        (dict(operations=("all_reduced",)), "--op='all_reduced': must be one of all_reduce, all_gather"),
        (dict(dtypes=("int32",), reductions=("avg",)), "--redop='avg': a mean of whole numbers is none"),
        (dict(graph=4), "--graph=4: graphs are CUDA's"),
        (
            dict(backend="nccl", graph=4, operations=tuple(OPERATIONS)),
            "--graph=4: a barrier waits on the CPU, which no graph has; leave it out of --op.",
        ),
        (
            dict(operations=("all_reduce", "broadcast"), algorithms=("", "ring")),
            "--algorithm='ring': is for all_reduce, not for broadcast; leave one of them out.",
        ),
        (dict(reductions=("avg",), algorithms=("ring",)), "--redop='avg': algorithms of ours have sum, prod, max, min"),
        (dict(algorithms=("magic",)), "--algorithm='magic': must be one of ring, recursive_doubling"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Spec(**settings)
    assert str(caught.value).startswith(sentence)


def test_a_root_is_in_every_group(ranks) -> None:
    with pytest.raises(RankFailure, match=r"--root=2: a group of 2 ranks has the indices 0 to 1"):
        measured(ranks, 3, operations=("broadcast",), groups=("world", "0,1"), sizes=(64,), root=2)


def test_settings_travel() -> None:
    spec = Spec(operations=("barrier", "gather"), sizes=(3, 4), fault={"kind": "absent", "rank": 1})
    import json

    assert Spec.of(json.loads(json.dumps(spec.plain()))) == spec
