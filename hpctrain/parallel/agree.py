"""Actions that succeed on all ranks or fail on all, so that nobody waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hpctrain.errors import HpctrainError, LaunchError, os_sentence
from hpctrain.parallel.comm import Axis, gather_objects

T = TypeVar("T")


def everywhere(action: Callable[[], T], axis: Axis) -> T:
    """Run an action on every rank of the axis.

    Returns:
        What it returned here, if it raised nowhere.

    Raises:
        HpctrainError: the error of the first rank where it raised; the same on every rank.
    """
    value: T
    mine: Exception | None = None
    try:
        value = action()
    except Exception as error:
        mine = error
    told = gather_objects(None if mine is None else _told(mine, axis), axis)
    first = next((error for error in told if error is not None), None)
    if first is not None:
        if mine is not None and not isinstance(mine, (HpctrainError, OSError)):
            raise mine
        raise first
    return value


def _told(error: Exception, axis: Axis) -> HpctrainError:
    """As other ranks get it."""
    if isinstance(error, HpctrainError):
        return error
    text = os_sentence(error) if isinstance(error, OSError) else None
    return LaunchError(text or f"rank {axis.ranks[axis.index]} failed: {type(error).__name__}: {error}.")
