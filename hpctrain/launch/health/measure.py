"""Measures one rank: its arithmetic, its memory, and its links to other ranks. Short: seconds, not minutes."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpctrain.launch.health.judge import rounds

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SAMPLES, WARM = 7, 2
ROUNDS = 8
"""Partners on other nodes that a rank is measured with, at most."""


@dataclass(frozen=True)
class Sizes:
    """How much is computed and moved for one sample.

    Attributes:
        matrix: rows and columns of the factors.
        memory_bytes: that are copied.
        link_bytes: that a rank sends, and gets, at once.
    """

    matrix: int
    memory_bytes: int
    link_bytes: int

    @staticmethod
    def of(device: str) -> Sizes:
        """For a kind of device: large enough that launching takes no part in it, small enough for any memory."""
        return Sizes(8192, 1 << 30, 64 << 20) if device == "cuda" else Sizes(256, 16 << 20, 1 << 20)


def alone(place: torch.device, sizes: Sizes | None = None) -> tuple[dict[str, tuple[float, ...]], str]:
    """Rates of arithmetic (FLOP/s) and of memory (bytes/s, read and written), and what came out wrong."""
    import torch

    sizes = sizes or Sizes.of(place.type)
    if place.type == "cpu":
        torch.set_num_threads(1)  # as many as every rank has for certain
    kind = torch.bfloat16 if place.type == "cuda" else torch.float32
    n = sizes.matrix
    # Small whole numbers: every sum is exact, on any device and in any order.
    a = (torch.arange(n, device=place) % 3).to(kind).expand(n, n).contiguous()
    b = torch.ones(n, n, device=place, dtype=kind)
    c = torch.empty(n, n, device=place, dtype=kind)
    source = torch.ones(sizes.memory_bytes // 4, device=place, dtype=torch.float32)
    target = torch.zeros_like(source)
    samples = {
        "matmul": _rates(2.0 * n**3, lambda: torch.matmul(a, b, out=c), place),
        "memory": _rates(2.0 * sizes.memory_bytes, lambda: target.copy_(source), place),
    }
    wrong = []
    expected = torch.tensor(float((torch.arange(n) % 3).sum()), dtype=kind)
    if not bool((c.cpu() == expected).all()):
        wrong.append("a product of matrices is wrong")
    if not bool((target == 1).all()):
        wrong.append("memory does not hold what was written to it")
    return samples, "; ".join(wrong)


def _rates(amount: float, action: Callable[[], object], place: torch.device) -> tuple[float, ...]:
    """Amount a second, of several samples."""
    found = []
    for i in range(WARM + SAMPLES):
        start = _now(place)
        action()
        seconds = _now(place) - start
        if i >= WARM:
            found.append(amount / max(seconds, 1e-9))
    return tuple(found)


def _now(place: torch.device) -> float:
    """Seconds, when all that was asked of the device is done."""
    import torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()


@dataclass(frozen=True)
class Met:
    """What a rank measured with another.

    Attributes:
        metric: local or rail.
        peer: rank.
        samples: bytes/s, each way at once.
        wrong: what arrived was not what was sent.
    """

    metric: str
    peer: int
    samples: tuple[float, ...]
    wrong: bool = False


@dataclass(frozen=True)
class Meeting:
    """A round: all pairs of ranks exchange at once, so every rail carries its own bytes and no other's.

    Attributes:
        metric: local or rail.
        peer: of this rank; None where it has none in this round.
    """

    metric: str
    peer: int | None


def meetings(rank: int, per_node: int, nodes: Sequence[int]) -> list[Meeting]:
    """Whom a rank meets: others of its node, then the same local rank of other nodes. As many rounds for all ranks.

    Args:
        nodes: that take part, by number; a rank of another one meets nobody.
    """
    node, local = divmod(rank, per_node)
    here = [partners[local] for partners in rounds(per_node, ROUNDS)]
    there = rounds(len(nodes), ROUNDS)
    if node not in nodes:
        return [*(Meeting("local", None) for _ in here), *(Meeting("rail", None) for _ in there)]
    found = [Meeting("local", None if at is None else node * per_node + at) for at in here]
    for partners in there:
        at = partners[nodes.index(node)]
        found.append(Meeting("rail", None if at is None else nodes[at] * per_node + local))
    return found


@dataclass(frozen=True)
class Lines:
    """Process groups of the measurement.

    Attributes:
        up: in which ranks line up for a round; on the CPU, over the way that all hosts have.
        across: over which pairs exchange: each rank's own rail.
    """

    up: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None


def lines(place: torch.device, interface: str, members: Sequence[int], timeout_s: float) -> Lines:
    """Groups for the ranks of a default group that was made without the rank's own interface. Collective.

    Args:
        interface: of this rank's rail, for gloo; "" where it has none.
        members: ranks that exchange.
        timeout_s: of one exchange.
    """
    import torch.distributed as dist

    if not members:
        return Lines()
    timeout = datetime.timedelta(seconds=timeout_s)
    if place.type == "cuda":  # NCCL chooses the rail by itself, and connects when it sends
        return Lines(up=dist.new_group(backend="gloo"))
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # a pair that cannot connect is to be seen in its round
    return Lines(across=dist.new_group(list(members), timeout=timeout))


def links(
    rank: int,
    per_node: int,
    nodes: Sequence[int],
    place: torch.device,
    begin: Callable[[int, int | None], None] = lambda round, peer: None,
    groups: Lines | None = None,
    sizes: Sizes | None = None,
) -> Iterator[Met]:
    """Rates between this rank and others, as they are found. Collective, also for ranks that meet nobody.

    Args:
        nodes: that take part, by number.
        begin: told of the number of a round, and of the peer in it, before this rank enters it.
    """
    for number, meeting in enumerate(meetings(rank, per_node, nodes)):
        begin(number, meeting.peer)
        yield from _meet(meeting, rank, place, groups or Lines(), sizes or Sizes.of(place.type))


def _meet(meeting: Meeting, rank: int, place: torch.device, groups: Lines, sizes: Sizes) -> list[Met]:
    """One round: all ranks begin together."""
    import torch
    import torch.distributed as dist

    peer = meeting.peer
    dist.all_reduce(torch.zeros(1), group=groups.up)
    if peer is None:
        return []
    sent = torch.full((sizes.link_bytes // 4,), float(rank), device=place)
    got = torch.empty_like(sent)

    def exchange() -> None:
        operations = [dist.P2POp(do, data, peer, groups.across) for do, data in ((dist.isend, sent), (dist.irecv, got))]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    samples = _rates(float(sizes.link_bytes), exchange, place)
    return [Met(meeting.metric, peer, samples, wrong=not bool((got == float(peer)).all()))]
