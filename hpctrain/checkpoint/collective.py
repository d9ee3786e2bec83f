"""Saving and choosing, by all ranks together.

Whatever a rank raises is told to all before the next of them waits for it: no rank is left alone in a
collective, and all raise the same error, or none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from hpctrain.checkpoint import catalog, commit
from hpctrain.checkpoint.manifest import FOLDER, MANIFEST
from hpctrain.checkpoint.read import CheckpointReader
from hpctrain.checkpoint.verify import Damage, Share, Verdict, identity_of, verify
from hpctrain.checkpoint.write import snapshot, write
from hpctrain.errors import CheckpointError
from hpctrain.parallel.comm import Axis, broadcast_object, gather_objects
from hpctrain.sharding.state import StateSource

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class SaveReport:
    """A committed checkpoint, the same on every rank but for the time.

    Attributes:
        seconds: from the call to the commit.
        bytes: of all ranks.
        path: its folder.
    """

    seconds: float
    bytes: int
    path: Path


@dataclass(frozen=True)
class Found:
    """A valid checkpoint to start from.

    Attributes:
        path: its folder.
        step: optimizer steps made.
        reader: of its tensors and scalars.
        extra: what the driver saved.
        refused: newer ones that were stepped over, with their damage.
    """

    path: Path
    step: int
    reader: CheckpointReader
    extra: dict[str, Any]
    refused: tuple[Verdict, ...] = ()

    @property
    def identity(self) -> int:
        """As of `Verdict`."""
        return identity_of(self.reader.manifest)


def save(
    folder: Path,
    step: int,
    source: StateSource,
    extra: Mapping[str, Any],
    axis: Axis,
    keep: int = 2,
    refused: Sequence[Verdict] = (),
) -> SaveReport:
    """Save a state. When it returns, on any rank, the checkpoint is on the disk and is the newest.

    Args:
        folder: of the run.
        step: optimizer steps made.
        source: this rank's state; must not change before the return.
        extra: what the driver wants to know again; must survive JSON. The first rank's counts.
        axis: all ranks that hold state.
        keep: committed checkpoints that are left, this one included.
        refused: by `find`, when this run began: they do not count among those, and are set aside.

    Raises:
        CheckpointError: on all ranks, if any rank failed. Nothing of the attempt is left; older checkpoints
            are as they were.
    """
    began = time.perf_counter()
    root = folder / FOLDER
    ranks = _Together(axis, f"Checkpoint of step {step} in {root} was not saved")
    shot = ranks.do(lambda: snapshot(source))
    need = sum(ranks.each(lambda: shot.bytes))
    staging = ranks.first(lambda: commit.prepare(root, step, need))
    try:
        records = [r for some in ranks.each(lambda: write(staging, axis.ranks[axis.index], shot)) for r in some]
        path = ranks.first(lambda: commit.commit(staging, step, shot.scalars, extra, records))
    except CheckpointError:
        _on_first(axis, "an unfinished checkpoint was not removed", lambda: commit.abandon(staging))
        raise
    seconds = time.perf_counter() - began
    _on_first(axis, "an old checkpoint was not deleted", lambda: commit.prune(path, keep, refused))
    return SaveReport(seconds, sum(r.bytes for r in records), path)


def find(folder: Path, axis: Axis) -> Found | None:
    """The newest valid checkpoint, chosen alike by all ranks; each reads a share of the files to verify it.

    Args:
        folder: of the run; or a folder of checkpoints, or one checkpoint.
        axis: all ranks that will read it.

    Returns:
        None where nothing was ever committed.

    Raises:
        CheckpointError: on all ranks: there are checkpoints and none is valid.
    """
    ranks = _Together(axis, f"No checkpoint was chosen in {folder}")
    refused: list[Verdict] = []
    for path in ranks.first(lambda: catalog.candidates(folder)):
        verdict = _judge(path, axis, ranks)
        if verdict.valid:
            return _open(path, ranks, tuple(refused))
        refused.append(verdict)
        if axis.index == 0:
            log.warning("checkpoint refused, trying the one before: %s", verdict)
    if refused:
        raise CheckpointError(
            f"No valid checkpoint in {folder}: {' | '.join(str(v) for v in refused)}; restore one of them, or choose "
            f"another run folder to start anew."
        )
    lost = ranks.first(lambda: catalog.pointer(catalog.root_of(folder)))
    if lost is not None:
        raise CheckpointError(
            f"{catalog.root_of(folder)} has no checkpoint although its pointer names {lost!r}; restore it, or delete "
            f"the pointer to start anew."
        )
    return None


def _judge(path: Path, axis: Axis, ranks: _Together) -> Verdict:
    """The verdict of all ranks, each over its share of the files; they must also see the same manifest."""
    verdicts = ranks.each(lambda: verify(path, Share(axis.index, axis.size)))
    damage = list(dict.fromkeys(d for v in verdicts for d in v.damage))
    if not damage and len({v.identity for v in verdicts}) > 1:
        damage.append(Damage(MANIFEST, "differs between ranks; the run folder must be on a shared filesystem"))
    return Verdict(path, tuple(damage), verdicts[0].bytes, verdicts[0].identity)


def _open(path: Path, ranks: _Together, refused: tuple[Verdict, ...]) -> Found:
    reader = ranks.do(lambda: CheckpointReader(path))
    return Found(path, reader.step, reader, reader.extra, refused)


class _Together:
    """Runs actions on ranks that must agree on the outcome.

    Args:
        axis: the ranks.
        failure: what it means if an action fails on one of them.
    """

    def __init__(self, axis: Axis, failure: str) -> None:
        self._axis, self._failure = axis, failure

    def each(self, action: Callable[[], T]) -> list[T]:
        """What it returns on each rank; for small values."""
        outcome = _attempt(action)
        return self._values(gather_objects(outcome.told(), self._axis), outcome)

    def do(self, action: Callable[[], T]) -> T:
        """What it returns here, if it returns everywhere; for values that stay where they are."""
        outcome = _attempt(action)
        verdict: _Outcome[None] = _Outcome(None, outcome.failure)
        self._values(gather_objects(verdict, self._axis), outcome)
        return cast(T, outcome.value)

    def first(self, action: Callable[[], T]) -> T:
        """What it returns on the first rank, where alone it runs."""
        outcome: _Outcome[T] = _attempt(action) if self._axis.index == 0 else _Outcome()
        return self._values([broadcast_object(outcome.told(), self._axis)], outcome)[0]

    def _values(self, outcomes: list[_Outcome[T]], own: _Outcome[Any]) -> list[T]:
        failures = [f"rank {self._axis.ranks[i]}: {o.failure}" for i, o in enumerate(outcomes) if o.failure]
        if failures:
            more = f" (and {len(failures) - 3} more ranks)" if len(failures) > 3 else ""
            raise CheckpointError(f"{self._failure}: {'; '.join(failures[:3])}{more}.") from own.error
        return [cast(T, o.value) for o in outcomes]


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    """What an action came to on one rank: a value, or a failure in words."""

    value: T | None = None
    failure: str = ""
    error: Exception | None = None

    def told(self) -> _Outcome[T]:
        """As other ranks get it: not every exception can be sent."""
        return _Outcome(self.value, self.failure)


def _attempt(action: Callable[[], T]) -> _Outcome[T]:
    try:
        return _Outcome(action())
    except CheckpointError as error:
        return _Outcome(None, str(error).removesuffix("."), error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _Outcome(None, f"{error.strerror or error}{where}", error)
    except Exception as error:
        return _Outcome(None, f"{type(error).__name__}: {error}", error)


def _on_first(axis: Axis, failure: str, action: Callable[[], None]) -> None:
    """Tidy up on the first rank; a failure there is a warning, since what matters is settled already."""
    if axis.index == 0:
        outcome = _attempt(action)
        if outcome.failure:
            log.warning("%s: %s", failure, outcome.failure)
