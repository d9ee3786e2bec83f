"""Contenders that are all alive at once and take steps in turn, so that a change in the machine's speed meets all.

Each has its own ranks, forked from one warm process, and builds what it trains once. Then, round after round, each
in its turn takes some steps while the ranks of the others sleep in a read. (A zygote would be no use here: it looks
after its ranks a thousand times a second.) A time is from the first rank's
beginning to the last rank's end, by the clock that all processes share.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple, NoReturn

from hpctrain.launch.life.process import die_with_parent, exit_now

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
        counts: what else is counted of it, so far, by name.
    """

    step: Callable[[], float | None]
    parameters: float
    cpu: Callable[[], float] = time.process_time
    counts: Callable[[], Mapping[str, float]] = dict


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
        grown: most bytes that a rank had grown by since it was forked, of all ranks.
        parameters: of the model, by its ranks' account; of all copies together.
        loss: mean over the tokens, of the first step.
        counts: what its ranks counted, all together a step, of every round.
        error: what ended it, if it could not take part to the end.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    grown: int = 0
    parameters: float = 0.0
    loss: float = 0.0
    counts: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None


def warm_up(imports: Sequence[str]) -> None:
    """Import what ranks need, once, and have their collections of garbage pass over it."""
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def race(contenders: Sequence[Contender], rounds: int, steps: int = 1) -> dict[str, Record]:
    """Let all contenders take turns.

    The ranks are forked from the calling process, which must have imported what they need, or much of it, and have
    computed nothing and started no thread.

    Args:
        contenders: with different names.
        rounds: in each of which all have their turn, in an order that shifts from round to round.
        steps: of a turn.
    """
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-bench-"))
    parties: dict[str, _Party] = {}
    records = {c.name: Record() for c in contenders}
    try:
        for at, contender in enumerate(contenders):
            parties[contender.name] = _Party(contender, folder / str(at))
        for name, party in parties.items():
            _guarded(records[name], party.begin, records[name])
        for turn in range(rounds):
            first = turn % len(parties)
            for name in [*parties][first:] + [*parties][:first]:
                _guarded(records[name], parties[name].turn, records[name], steps)
    finally:
        for party in parties.values():
            party.end()
        rmtree(folder)
    return records


def rates(records: dict[str, Record], tokens: int) -> dict[str, float]:
    """Tokens a second, median over rounds, of all that were there to the end; `tokens` are those of a step."""
    return {name: tokens / statistics.median(r.seconds) for name, r in records.items() if r.error is None}


def ratios(records: dict[str, Record], name: str, base: str) -> list[float]:
    """How many times as fast as `base` a contender was, of every round."""
    return [b / a for a, b in zip(records[name].seconds, records[base].seconds)]


def _guarded(record: Record, function: Callable[..., None], *args: Any) -> None:
    """Call it for a contender that is still there; a failure of its ranks puts it out."""
    if record.error is None:
        try:
            function(*args)
        except _Lost as lost:
            record.error = str(lost)


class _Lost(Exception):
    """A rank has failed; says why."""


class _Answer(NamedTuple):
    begin: float
    end: float
    cpu: float
    loss: float | None
    grown: int
    counts: dict[str, float]


class _Party:
    """The ranks of a contender, seen from the process that forks them. They begin to build at once."""

    def __init__(self, contender: Contender, folder: Path) -> None:
        self.pids: list[int] = []
        self.links: list[Connection] = []
        for copy in range(contender.copies):
            for rank in range(max(1, contender.world)):
                ours, theirs = Pipe()
                pid = os.fork()
                if pid == 0:
                    ours.close()
                    _rank(contender, rank, folder / str(copy), theirs)
                theirs.close()
                self.pids.append(pid)
                self.links.append(ours)

    def begin(self, record: Record) -> None:
        """Wait until all is built, and warm up."""
        record.parameters = sum(self._receive())
        for at in range(WARM_UP):
            losses = [a.loss for a in self.ask(1) if a.loss is not None]
            if at == 0:
                record.loss = statistics.fmean(losses)

    def turn(self, record: Record, steps: int) -> None:
        """One turn, timed."""
        began, busy = time.monotonic(), _busy()
        answers = self.ask(steps)
        span, cpu = time.monotonic() - began, sum(a.cpu for a in answers)
        record.seconds.append((max(a.end for a in answers) - min(a.begin for a in answers)) / steps)
        record.cpu.append(cpu / steps)
        record.others.append(max(0.0, (_busy() - busy - cpu) / span))
        record.grown = max(record.grown, *(a.grown for a in answers))
        record.counts.append({name: sum(a.counts[name] for a in answers) / steps for name in answers[0].counts})

    def ask(self, steps: int) -> list[_Answer]:
        """Have all ranks take steps at once."""
        for link in self.links:
            link.send(steps)
        return self._receive()

    def end(self) -> None:
        """End all ranks."""
        for pid in self.pids:
            for kill in (os.kill, os.killpg):  # it may not have made its group yet
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _receive(self) -> list[Any]:
        """What all ranks answer. The first to fail ends the wait: the others may be waiting for it."""
        answers: dict[Any, Any] = {}
        while len(answers) < len(self.links):
            for link in wait([link for link in self.links if link not in answers]):
                assert isinstance(link, Connection)
                try:
                    answers[link] = link.recv()
                except EOFError:
                    raise _Lost(f"a rank was killed, or took longer than {LIMIT_S} s") from None
                if isinstance(answers[link], str):
                    raise _Lost(answers[link])
        return [answers[link] for link in self.links]


def _rank(contender: Contender, rank: int, folder: Path, link: Connection) -> NoReturn:
    """Body of a rank: build, then take as many steps as it is told, again and again."""
    try:
        die_with_parent(os.getppid())
        os.setpgid(0, 0)
        forked = _status("VmRSS")
        os.dup2(2, 1)  # what libraries print is not the result
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        _join(rank, contender.world, folder)
        work = contender.build(*contender.args)
        signal.alarm(0)
        link.send(work.parameters)
        while True:
            steps = link.recv()
            signal.alarm(LIMIT_S)
            counts, begin, cpu = work.counts(), time.perf_counter(), work.cpu()
            for _ in range(steps):
                loss = work.step()
            end = time.perf_counter()
            cpu, now = work.cpu() - cpu, work.counts()
            more = {name: now[name] - counts[name] for name in now}
            link.send(_Answer(begin, end, cpu, loss, _status("VmHWM") - forked, more))
            signal.alarm(0)
    except BaseException as error:
        with suppress(OSError):
            link.send(f"{type(error).__name__}: {error}".strip().splitlines()[-1])
    finally:
        exit_now(1)


def _join(rank: int, world: int, folder: Path) -> None:
    """One thread; and, in a world, this rank's part in a gloo group over a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        folder.mkdir(parents=True, exist_ok=True)
        store = dist.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _status(line: str) -> int:
    """Bytes that a line of /proc/self/status says."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{line}:")[2].split(None, 1)[0]) * 1024


def _busy() -> float:
    """CPU-seconds that the machine has worked since it started: user, nice, system, interrupts."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
