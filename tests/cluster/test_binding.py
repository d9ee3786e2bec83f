"""CPUs of ranks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.binding import cpu_sets, near_cpus
from hpctrain.cluster.node import Gpu, Node, Numa


def node(*numas: Numa, near: tuple[int | None, ...]) -> Node:
    return Node(gpus=tuple(Gpu(i, numa=n) for i, n in enumerate(near)), numas=numas)


def test_cores_near_a_gpu_are_shared_with_both_threads() -> None:
    """Two sockets of eight cores; second threads are numbered after all the first."""
    machine = node(Numa(0, (*range(8), *range(16, 24))), Numa(1, (*range(8, 16), *range(24, 32))), near=(1, 1, 0, 0))
    assert cpu_sets(machine, range(4)) == (
        (8, 9, 10, 11, 24, 25, 26, 27),
        (12, 13, 14, 15, 28, 29, 30, 31),
        (0, 1, 2, 3, 16, 17, 18, 19),
        (4, 5, 6, 7, 20, 21, 22, 23),
    )


def test_threads_of_a_core_stay_together() -> None:
    """Three ways to number sixteen threads of two sockets; the GPUs of a socket get two cores each, of which none is
    another's."""
    in_order = [(i, i + 8) for i in range(8)]  # sockets one after the other, then second threads
    beside = [(2 * i, 2 * i + 1) for i in range(8)]  # threads of a core side by side, as in many virtual machines
    in_turn = [(i, i + 8) for i in range(8)]  # sockets in turn: even CPUs on the first
    for cores, first in ((in_order, {0, 1, 2, 3}), (beside, {0, 1, 2, 3}), (in_turn, {0, 2, 4, 6})):
        socket = tuple(cpu for i, core in enumerate(cores) if i in first for cpu in core)
        machine = replace(node(Numa(0, tuple(sorted(socket))), near=(0, 0)), cores=tuple(cores))
        a, b = cpu_sets(machine, (0, 1))
        assert len(a) == len(b) == 4 and not set(a) & set(b)
        assert all(not ({*core} & {*a} and {*core} & {*b}) for core in cores), cores
    uneven = replace(node(Numa(0, tuple(range(6))), near=(0, 0)), cores=((0, 1), (2, 3), (4, 5)))
    assert cpu_sets(uneven, (0, 1)) == ((0, 1, 2, 3), (4, 5))


def test_sockets_numbered_in_turn_share_no_core_even_if_nobody_tells_threads() -> None:
    """mooncake#2039: CPU numbers alternate by socket. 0,2,..,94 may be 24 cores of two threads, c and c + 48."""
    even = tuple(range(0, 96, 2))
    sets = cpu_sets(node(Numa(0, even), near=(0,) * 4), range(4))
    assert sorted(cpu for mine in sets for cpu in mine) == list(even)
    assert all((cpu + 48) % 96 in mine for mine in sets for cpu in mine)


def test_order_of_ranks_and_numbers_that_do_not_come_out() -> None:
    machine = node(Numa(0, tuple(range(7))), near=(0, 0, 0))
    assert cpu_sets(machine, (2, 0, 1)) == ((0, 1, 2), (3, 4), (5, 6))
    assert cpu_sets(machine, (0,)) == (tuple(range(7)),)
    assert cpu_sets(node(Numa(0, (0, 1)), near=(0, 0, 0)), range(3)) == ((0, 1),) * 3


def test_memory_of_a_gpu_has_no_cpus() -> None:
    """A GB200 names its GPUs' memory among the NUMA nodes."""
    machine = node(Numa(0, tuple(range(4))), Numa(2, (), of_gpu=True), Numa(3, (9,), of_gpu=True), near=(0, 2, 3))
    assert cpu_sets(machine, range(3)) == ((0, 1, 2, 3), (), ())


def test_memory_that_a_gpu_names_has_no_cpus() -> None:
    """NVML tells which NUMA nodes are memory of a GPU, of any of the node's, where /sys does not mark them."""
    gpus = (Gpu(0, numa=0, memory=(2,)), Gpu(1, numa=2))
    machine = Node(gpus=gpus, numas=(Numa(0, (0, 1)), Numa(2, (8, 9))))
    assert near_cpus(machine, gpus[1]) == (None, ()) and near_cpus(machine, gpus[0]) == (0, (0, 1))
    told = Gpu(1, numa=2, cpus=(0,))
    assert near_cpus(Node(gpus=(gpus[0], told), numas=machine.numas), told) == (0, (0,))


def test_what_nothing_says_is_not_guessed() -> None:
    machine = node(Numa(0, (0, 1)), Numa(1, (2, 3)), near=(None, 1))
    assert cpu_sets(machine, (0, 1)) == ((), (2, 3))
    assert cpu_sets(node(Numa(0, (0, 1)), near=(None, None)), (0, 1)) == ((0,), (1,))
    assert near_cpus(Node(numas=(Numa(3, (4, 5, 6)),)), Gpu(0, cpus=(4, 5))) == (3, (4, 5))
    assert cpu_sets(Node(), (0, 1)) == ((), ())


def test_without_gpus_all_cpus_are_shared() -> None:
    assert cpu_sets(Node(numas=(Numa(0, (0, 1)), Numa(1, (2, 3)))), (0, 1)) == ((0, 1), (2, 3))


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 3))
def test_every_cpu_once(ranks: int, cores: int, numas: int) -> None:
    machine = node(*(Numa(n, tuple(range(n * cores, n * cores + cores))) for n in range(numas)), near=(0,) * ranks)
    sets = cpu_sets(machine, range(ranks))
    if cores >= ranks:
        assert sorted(cpu for mine in sets for cpu in mine) == list(range(cores))
        assert max(map(len, sets)) - min(map(len, sets)) <= 1 + (cores % 2 == 0)
    else:
        assert set(sets) == {tuple(range(cores))}
