"""What the profile of ZeRO 3 counts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import layouts, zero3
from tests.benchmarks.test_layouts import TINY


def warm_profile(name: str) -> dict[str, float]:
    layouts.warm_up(layouts.IMPORTS)
    return zero3.profile(name, [*TINY, "model.layers=1"])


@pytest.fixture(scope="module")
def found(zygote: Any) -> dict[str, dict[str, float]]:
    return {name: zygote.run(warm_profile, 2, name)[0] for name in zero3.NAMES}


def test_lean_ones_gather_the_same_and_those_that_keep_gather_less(found: dict[str, dict[str, float]]) -> None:
    ours, kept, lean, default = (found[name] for name in zero3.NAMES)
    assert ours["gathered"] == lean["gathered"] > kept["gathered"] >= default["gathered"] > 0
    assert len({f["reduce-scattered"] for f in found.values()}) == 1
    assert all(f["fetches of modules"] > 0 < f["CPU seconds"] for f in found.values())
