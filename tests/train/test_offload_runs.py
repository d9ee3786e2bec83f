"""Lives of a run whose state waits elsewhere: saved, killed, and gone on with under other layouts and places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.layout.offload import DiskRates
from hpctrain.telemetry.disk import keep_rates
from tests.train.driving import drive, engine_settings, evaluations, losses


@pytest.fixture
def disk(tmp_path: Path) -> str:
    folder = tmp_path / "disk"
    folder.mkdir()
    keep_rates(folder, DiskRates(1e9, 1e9, 4096, 3))
    return str(folder)


def away(stage: int, disk: str, *places: str) -> dict[str, Any]:
    """Settings of ZeRO whose `places` are on the disk."""
    offload = dict.fromkeys(places, "nvme") | ({"path": disk} if places else {})
    return engine_settings(stage) | {"sharding": {"stage": stage, "bucket_mib": 0.005, "offload": offload}}


ALL = ("optimizer", "params", "gradients")


@pytest.mark.parametrize(("stage", "places"), [(1, ALL[:1]), (3, ALL)])
def test_a_killed_run_continues_bitwise(
    ranks: Any, make: Any, tmp_path: Path, disk: str, stage: int, places: tuple[str, ...]
) -> None:
    config = make(**away(stage, disk, *places), parallel=dict(tp=2))
    undisturbed = config.model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(4, drive, undisturbed, 4)
    ranks(4, drive, config, 4, 5)
    ranks(4, drive, config, 4)
    assert losses(config) == losses(undisturbed) and evaluations(config) == evaluations(undisturbed)


def test_layout_and_place_may_change_between_lives(ranks: Any, make: Any, tmp_path: Path, disk: str) -> None:
    """To the disk, between layouts there, off it, and back: the curve of a run that never offloaded."""
    undisturbed = make(**engine_settings(0)).model_copy(update={"folder": tmp_path / "undisturbed"})
    ranks(1, drive, undisturbed, 1)
    lives: list[tuple[int, tuple[str, ...], dict[str, int], int, int | None]] = [
        (1, ALL[:1], dict(tp=2), 4, 2),
        (3, ALL, dict(tp=1), 2, 3),
        (0, (), dict(tp=1), 2, 4),
        (3, ALL[:2], dict(pp=2), 4, 5),
        (2, ALL[:1], dict(tp=1), 4, None),
    ]
    for stage, places, parallel, world, until in lives:
        config = make(**away(stage, disk, *places), parallel=parallel, checkpoint=dict(every=1))
        ranks(world, drive, config, world, until)
    got, want = losses(config), losses(undisturbed)
    assert got.keys() == want.keys()
    # float32 sums in another order; AdamW enlarges the rounding of small gradients in its first steps.
    assert np.allclose(list(got.values()), list(want.values()), rtol=2e-5, atol=0)
    assert np.allclose(evaluations(config)[-1], evaluations(undisturbed)[-1], rtol=2e-5, atol=0)
    assert not [path for path in Path(disk).iterdir() if not path.name.endswith(".json")], "nothing is left"
