"""Work that a machine's speed does not change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Calls:
    """How many functions were called, those of C included."""

    def __init__(self) -> None:
        self.number = 0


@contextmanager
def calls() -> Iterator[Calls]:
    """Counts the calls of this thread while it holds: with arrays of a bounded size, steps that are taken."""
    made = Calls()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        made.number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield made
    finally:
        sys.setprofile(before)
