"""Dynamic loss scale for float16 (Micikevicius et al., arXiv 1710.03740)."""

from __future__ import annotations

GROWTH_INTERVAL = 1000
SMALLEST = 1.0
LARGEST = 2.0**24


class LossScale:
    """Halved when a step overflows, doubled after `GROWTH_INTERVAL` steps in a row that did not.

    Args:
        initial: first scale.
        dynamic: False keeps it at 1, for precisions that need none.
    """

    def __init__(self, initial: float, dynamic: bool) -> None:
        self.dynamic = dynamic
        self.value = initial if dynamic else 1.0
        self.good_steps = 0

    def update(self, overflowed: bool) -> None:
        """Take note of a step's outcome."""
        if not self.dynamic:
            return
        if overflowed:
            self.value, self.good_steps = max(self.value / 2, SMALLEST), 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0
