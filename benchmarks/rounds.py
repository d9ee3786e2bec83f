"""Contenders that are all alive at once and take steps in turn, so that a change in the machine's speed meets all.

Each has its own ranks, forked from one warm process, and builds what it trains once. Then, round after round, each
in its turn takes some steps while the ranks of the others sleep on a socket. A time is from the first rank's
beginning to the last rank's end, by the clock that all processes share.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpctrain.launch.zygote import RankFailure, Zygote

LIMIT_S = 300
"""A rank that does not answer in this time is killed, and its contender is out."""

WARM_UP = 2
"""Steps that do not count, one after the other."""


@dataclass(frozen=True)
class Work:
    """What a rank has built.

    Attributes:
        step: takes one optimizer step; returns the mean loss where this rank knows it.
        parameters: this rank's share of the model's parameters, such that all ranks' shares add up to all of them.
        cpu: CPU-seconds used so far for this rank.
    """

    step: Callable[[], float | None]
    parameters: float
    cpu: Callable[[], float] = time.process_time


@dataclass(frozen=True)
class Contender:
    """Who takes part.

    Attributes:
        name: of it.
        build: called as `build(*args)` on every rank; gives its `Work`.
        args: for it.
        world: ranks of its process group; 0 is one process without any.
        copies: worlds that run at the same time and know nothing of each other.
    """

    name: str
    build: Callable[..., Work]
    args: tuple[Any, ...] = ()
    world: int = 2
    copies: int = 1


@dataclass
class Record:
    """What became of a contender.

    Attributes:
        seconds: a step, of every round.
        cpu: CPU-seconds of all ranks a step, of every round.
        others: cores that all else on the machine used meanwhile, of every round.
        parameters: of the model, by its ranks' account; of all copies together.
        loss: mean over the tokens, of the first step.
        error: what ended it, if it could not take part to the end.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    parameters: float = 0.0
    loss: float = 0.0
    error: str | None = None


def race(zygote: Zygote, contenders: Sequence[Contender], rounds: int, steps: int = 1) -> dict[str, Record]:
    """Let all contenders take turns.

    Args:
        zygote: whose process has imported what they need and computed nothing.
        contenders: with different names.
        rounds: in each of which all have their turn, in an order that shifts from round to round.
        steps: of a turn.
    """
    limit = LIMIT_S * (rounds + WARM_UP + 1) * max(1, len(contenders))
    records: dict[str, Record] = zygote.run(_referee, 0, contenders, rounds, steps, timeout_s=float(limit))[0]
    return records


def rates(records: dict[str, Record], tokens: int) -> dict[str, float]:
    """Tokens a second, median over rounds, of all that were there to the end; `tokens` are those of a step."""
    return {name: tokens / statistics.median(r.seconds) for name, r in records.items() if r.error is None}


def ratios(records: dict[str, Record], name: str, base: str) -> list[float]:
    """How many times as fast as `base` a contender was, of every round."""
    return [b / a for a, b in zip(records[name].seconds, records[base].seconds)]


def _referee(contenders: Sequence[Contender], rounds: int, steps: int) -> dict[str, Record]:
    """Runs in a process of its own, from which all ranks are forked before it starts a thread."""
    with ExitStack() as stack:
        parties = {c.name: _Party(c, stack) for c in contenders}  # closed last one first: a later one holds sockets
        pool = ThreadPoolExecutor(sum(c.copies for c in contenders))
        for party in parties.values():
            party.start(pool)
        records = {name: Record() for name in parties}
        for name, party in parties.items():
            _guarded(records[name], party.begin, records[name])
        for turn in range(rounds):
            at = turn % len(parties)
            for name in [*parties][at:] + [*parties][:at]:
                _guarded(records[name], party_turn, parties[name], records[name], steps)
        for party in parties.values():
            party.end()
        pool.shutdown()
    return records


def party_turn(party: _Party, record: Record, steps: int) -> None:
    """One turn, timed."""
    began, busy = time.monotonic(), _busy()
    answers = party.ask(steps)
    span, cpu = time.monotonic() - began, sum(a.cpu for a in answers)
    record.seconds.append((max(a.end for a in answers) - min(a.begin for a in answers)) / steps)
    record.cpu.append(cpu / steps)
    record.others.append(max(0.0, (_busy() - busy - cpu) / span))


def _guarded(record: Record, function: Callable[..., None], *args: Any) -> None:
    """Call it for a contender that is still there; a failure of its ranks puts it out."""
    if record.error is None:
        try:
            function(*args)
        except RankFailure as failure:
            record.error = str(failure).strip().splitlines()[-1]


@dataclass(frozen=True)
class _Answer:
    begin: float
    end: float
    cpu: float
    loss: float | None


class _Party:
    """The worlds of a contender, seen from the referee."""

    def __init__(self, contender: Contender, stack: ExitStack) -> None:
        self.contender, self.worlds = contender, []
        for _ in range(contender.copies):
            pairs = [socket.socketpair() for _ in range(max(1, contender.world))]
            zygote = Zygote(())
            stack.callback(zygote.close)
            self.worlds.append((zygote, pairs))
        self.links: list[tuple[Connection, Future[Any]]] = []

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Fork the ranks, which begin to build."""
        c = self.contender
        for zygote, pairs in self.worlds:
            ends = [theirs.fileno() for _, theirs in pairs]
            future = pool.submit(zygote.run, _rank, c.world, ends, c.build, c.args, timeout_s=1e6)
            self.links += [(Connection(ours.detach()), future) for ours, _ in pairs]

    def begin(self, record: Record) -> None:
        """Wait until all is built, and warm up."""
        record.parameters = sum(self._receive(link, future) for link, future in self.links)
        for at in range(WARM_UP):
            losses = [a.loss for a in self.ask(1) if a.loss is not None]
            if at == 0:
                record.loss = statistics.fmean(losses)

    def ask(self, steps: int) -> list[_Answer]:
        """Have all ranks take steps at once."""
        for link, _ in self.links:
            link.send(steps)
        return [self._receive(link, future) for link, future in self.links]

    def end(self) -> None:
        """Have all ranks leave."""
        for link, _ in self.links:
            link.send(0)

    @staticmethod
    def _receive(link: Connection, future: Future[Any]) -> Any:
        while not link.poll(0.1):
            if future.done():
                raise future.exception() or RankFailure("left early")
        return link.recv()


def _rank(ends: list[int], build: Callable[..., Work], args: tuple[Any, ...]) -> None:
    """Body of a rank: build, then take as many steps as it is told, until it is told 0."""
    import torch.distributed as dist

    os.dup2(2, 1)  # what libraries print is not the result
    link = Connection(ends[dist.get_rank() if dist.is_initialized() else 0])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    work = build(*args)
    signal.alarm(0)
    link.send(work.parameters)
    while steps := link.recv():
        signal.alarm(LIMIT_S)
        begin, cpu = time.perf_counter(), work.cpu()
        for _ in range(steps):
            loss = work.step()
        link.send(_Answer(begin, time.perf_counter(), work.cpu() - cpu, loss))
        signal.alarm(0)


def _busy() -> float:
    """CPU-seconds that the machine has worked since it started: user, nice, system, interrupts."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
