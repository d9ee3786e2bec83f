"""Dynamic loss scale for float16 (Micikevicius et al., arXiv 1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping

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

    def update(self, overflowed: bool) -> bool:
        """Take note of a step's outcome. Returns whether the scale was lowered."""
        if not self.dynamic:
            return False
        if overflowed:
            lowered = self.value > SMALLEST
            self.value, self.good_steps = max(self.value / 2, SMALLEST), 0
            return lowered
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = min(self.value * 2, LARGEST), 0
        return False

    def scalars(self) -> dict[str, float]:
        """What a checkpoint keeps of it: nothing where it is not dynamic."""
        return {"loss_scale": self.value, "loss_scale_good_steps": float(self.good_steps)} if self.dynamic else {}

    def load(self, scalars: Mapping[str, float]) -> None:
        """Continue; a checkpoint of a precision without a scale changes nothing."""
        if self.dynamic and "loss_scale" in scalars:
            self.value = scalars["loss_scale"]
            self.good_steps = int(scalars.get("loss_scale_good_steps", 0))
