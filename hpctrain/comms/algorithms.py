"""All-reduce by sends and receives, four ways: a reference to learn from, and to see where each is fastest.

With n ranks, S bytes, latency a of a message and time b of a byte, a call takes about

    ring                2 (n-1) a + 2 (n-1)/n S b     least bytes, most messages: large S
    recursive_doubling  log2(n) (a + S b)             fewest messages, each of all bytes: small S
    tree                2 log2(n) (a + S b)           the root's links carry most, as in a broadcast
    hierarchical        a ring inside a node, rings between nodes of equal ranks, the ring inside once more

(Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005,
doi 10.1177/1094342005051521.) All are in place and for any number of ranks; they reduce in Python. Each makes the steps
of a rank once, and a call goes through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hpctrain.comms.backend import Act, Group, Task, in_turn
from hpctrain.comms.memory import Buffer, Combine, Memory
from hpctrain.errors import ConfigError
from hpctrain.layout.layout import split

Steps = Iterator[Act]


@dataclass(frozen=True)
class Work:
    """What a rank reduces: its data, as much room beside it, and how two of them become one."""

    group: Group
    data: Buffer
    spare: Buffer
    combine: Combine

    def part(self, n: int, i: int) -> Work:
        """The i-th of n parts."""
        start, size = split(len(self.data), n, i)
        return Work(self.group, self.data[start : start + size], self.spare[start : start + size], self.combine)

    def swap(self, out: Buffer, to: int, into: Buffer, of: int) -> Act:
        """An exchange that leaves out what is empty."""
        return self.group.exchange([(out, to)] if len(out) else [], [(into, of)] if len(into) else [])

    def add(self) -> Act:
        """Put what has come into the spare room to the data."""
        return partial(self.combine, self.data, self.spare)


def algorithm(name: str, group: Group, task: Task, memory: Memory, inner: int = 1) -> Act:
    """What does an all-reduce by an algorithm of ours, in place.

    Args:
        name: one of `formulas.ALGORITHMS`.
        group: the ranks.
        task: an all_reduce whose buffers are the same.
        memory: of the buffers.
        inner: ranks of a node, for `hierarchical`: consecutive ones, equally many on each.

    Raises:
        ConfigError: a group that it is not for.
    """
    combine = memory.combine(task.reduction)
    assert task.operation == "all_reduce" and combine is not None, "`Spec` refuses others"
    data, n, me = task.buffers.receive, len(group.ranks), group.index
    work = Work(group, data, memory.zeros(len(data), task.buffers.dtype), combine)
    if name == "ring":
        return in_turn(*ring(work, range(n), me))
    if name == "recursive_doubling":
        return in_turn(*recursive_doubling(work, n, me))
    if name == "tree":
        return in_turn(*tree(work, n, me))
    if inner < 1 or n % inner:
        raise ConfigError(
            "--algorithm",
            name,
            f"needs equally many ranks of the group on each node, not {n} ranks in nodes of {inner}",
        )
    node, local = divmod(me, inner)
    return in_turn(*hierarchical(work, range(node * inner, (node + 1) * inner), range(local, n, inner)))


def ring_reduce_scatter(work: Work, ranks: Sequence[int], me: int) -> Steps:
    """Leave in part `me` of the data what it is reduced over a ring; other parts hold leftovers."""
    n = len(ranks)
    after, before = ranks[(me + 1) % n], ranks[(me - 1) % n]
    for step in range(n - 1):
        gone, come = work.part(n, (me - 1 - step) % n), work.part(n, (me - 2 - step) % n)
        yield work.swap(gone.data, after, come.spare, before)
        yield come.add()


def ring_all_gather(work: Work, ranks: Sequence[int], me: int) -> Steps:
    """Bring every part to all ranks of a ring, of which the i-th has part i."""
    n = len(ranks)
    after, before = ranks[(me + 1) % n], ranks[(me - 1) % n]
    for step in range(n - 1):
        yield work.swap(work.part(n, (me - step) % n).data, after, work.part(n, (me - 1 - step) % n).data, before)


def ring(work: Work, ranks: Sequence[int], me: int) -> Steps:
    """Reduce-scatter and all-gather around a ring; `me` is the place in it."""
    yield from ring_reduce_scatter(work, ranks, me)
    yield from ring_all_gather(work, ranks, me)


def recursive_doubling(work: Work, n: int, me: int) -> Steps:
    """Exchange all with partners at distances 1, 2, 4, ...; ranks beyond a power of two hand theirs in and wait."""
    exchange, data, spare = work.group.exchange, work.data, work.spare
    power = 1 << (n.bit_length() - 1)
    if me >= power:
        yield exchange([(data, me - power)], [])
        yield exchange([], [(data, me - power)])
        return
    if me < n - power:
        yield exchange([], [(spare, me + power)])
        yield work.add()
    distance = 1
    while distance < power:
        other = me ^ distance
        yield exchange([(data, other)], [(spare, other)])
        yield work.add()
        distance *= 2
    if me < n - power:
        yield exchange([(data, me + power)], [])


def tree(work: Work, n: int, me: int) -> Steps:
    """Reduce along a binomial tree to rank 0, and broadcast along it."""
    exchange, data, spare = work.group.exchange, work.data, work.spare
    distance = 1
    while distance < n:
        if me & distance:
            yield exchange([(data, me - distance)], [])
            break
        if me + distance < n:
            yield exchange([], [(spare, me + distance)])
            yield work.add()
        distance *= 2
    if me:
        yield exchange([], [(data, me - distance)])
    distance //= 2
    while distance:
        if me + distance < n:
            yield exchange([(data, me + distance)], [])
        distance //= 2


def hierarchical(work: Work, inside: Sequence[int], across: Sequence[int]) -> Steps:
    """Reduce-scatter inside the node, all-reduce of a part with its peers on the other nodes, all-gather inside."""
    local, node = inside.index(work.group.index), across.index(work.group.index)
    yield from ring_reduce_scatter(work, inside, local)
    yield from ring(work.part(len(inside), local), across, node)
    yield from ring_all_gather(work, inside, local)
