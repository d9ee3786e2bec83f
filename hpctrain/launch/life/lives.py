"""The lives of a run: how often it was started, from which step, and when to give up.

A job that fails at the same place every time would be requeued for ever, billing every try. The run folder
keeps a line or two of each life; some in a row that each came no more than a step further are no progress. A life
that was preempted is none of these: that was not its fault, however often it comes.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import job_of
from hpctrain.launch.life.stop import SIGNALS, StopRequest

FILE = "lives.jsonl"

MAX_WITHOUT_PROGRESS = 3
"""Lives in a row that may bring the run no further."""

LOOK_S = 1.0
"""Between looks for a signal; after one that ends ranks, Slurm waits for `KillWait`, 30 s, before it kills them."""


@dataclass(frozen=True)
class Life:
    """One start of a run.

    Attributes:
        key: of the launcher: names the job, its step and its restart.
        step: where it began; -1 of one that has not come so far.
        asked: Slurm asked it to leave, before its time was up.
    """

    key: str
    step: int = -1
    asked: bool = False


def lives(folder: Path) -> list[Life]:
    """All lives of a run so far, in order; torn lines are left out. A life may have several lines."""
    path = folder / FILE
    out: dict[str, Life] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            life = Life(**json.loads(line))
        except (ValueError, TypeError):
            continue
        before = out.get(life.key, life)
        out[life.key] = Life(life.key, max(before.step, life.step), before.asked or life.asked)
    return list(out.values())


def _blamed(folder: Path, key: str) -> list[Life]:
    """Lives of the job that `key` is a life of, this one last, without those that Slurm has ended before their time."""
    mine = [life for life in lives(folder) if job_of(life.key) == job_of(key)]
    return [life for life in mine if not life.asked or life.key == key]


def knock(folder: Path, key: str, restarts: int) -> None:
    """Note that a life begins, before all that could end it. Called by the first rank.

    Raises:
        LaunchError: a requeued job whose last lives all ended before they began to train.
    """
    with suppress(OSError):  # what is wrong with the folder is said by all ranks together, later
        _write(folder, Life(key))
    before = _blamed(folder, key)[:-1][-MAX_WITHOUT_PROGRESS:]
    if restarts and len(before) == MAX_WITHOUT_PROGRESS and all(life.step < 0 for life in before):
        raise LaunchError(
            f"{len(before)} lives in a row of {folder} ended before they began to train: not tried again; "
            f"look at {folder / 'logs'} for what ends them, then submit the run anew."
        )


def _write(folder: Path, life: Life) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(asdict(life)) + "\n")


def begin(folder: Path, life: Life, restarts: int) -> None:
    """Note a life. Called by the first rank.

    Args:
        folder: of the run.
        life: about to begin.
        restarts: how often the job was requeued; one that a person starts is never refused.

    Raises:
        LaunchError: a requeued job that has made no progress in its last lives.
    """
    _write(folder, life)
    count = in_a_row(_blamed(folder, life.key))
    if restarts and count > MAX_WITHOUT_PROGRESS:
        raise LaunchError(
            f"{count} lives in a row of {folder} came no further than step {life.step}: not tried again; "
            f"look at {folder / 'logs'} for what ends them, then submit the run anew."
        )


def in_a_row(all_lives: list[Life]) -> int:
    """How many of the last lives, the last one included, have not brought the run further: no more than one step, which
    a life that is too short for its saves makes too."""
    count, next_step = 0, all_lives[-1].step
    for life in reversed(all_lives):
        if life.step >= 0 and next_step - life.step > 1:
            break
        count, next_step = count + 1, life.step if life.step >= 0 else next_step
    return count


@contextmanager
def excused(folder: Path, key: str, stop: StopRequest) -> Iterator[None]:
    """While inside, note it when this life is preempted: it may not live to do so later, at the end of a step.

    Signals that are held back while the ranks start are seen too.
    """
    over = threading.Event()

    def asked() -> bool:
        return stop.received is not None or bool(signal.sigpending() & set(SIGNALS))

    def watch() -> None:
        while not (last := over.wait(LOOK_S)) and not asked():
            pass
        if (not last or asked()) and not (stop.limit is not None and stop.limit.warned_of()):
            with suppress(OSError):
                _write(folder, Life(key, asked=True))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
