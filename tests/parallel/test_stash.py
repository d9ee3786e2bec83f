"""Activations that wait elsewhere: the same bits in every loss, norm and weight, and less of them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.layout.offload import DiskRates
from hpctrain.telemetry.disk import keep_rates
from hpctrain.telemetry.live import LiveBytes
from tests.training import assemble, make_config, make_mesh, run, train_step

WIDE = {"layers": 3, "hidden": 63, "ffn": 130, "heads": 6, "kv_heads": 2, "head_dim": 10, "max_seq": 96}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    keep_rates(tmp_path, DiskRates(1e9, 1e9, 8192, 2))
    return tmp_path


def config_of(
    folder: Path, place: str, recompute: Any, stage: int = 0, layers: int = 3, every: int = 1, **settings: Any
) -> Any:
    offload = {"activations": place} | ({"path": str(folder)} if place == "nvme" else {})
    precision = "float32" if stage else "float64"
    named = {} if isinstance(recompute, str) else {"recompute": "selective", "recompute_ops": recompute}
    return make_config(
        model=WIDE | {"layers": layers},
        data={"seq": 96},
        parallel=settings,
        train={"precision": precision, "micro_batch": 2, "recompute": recompute, "recompute_every": every} | named,
        sharding={"stage": stage, "bucket_mib": 0.05, "offload": offload},
    )


@pytest.mark.parametrize(
    ("place", "recompute", "stage", "settings"),
    [
        ("cpu", "none", 0, {"tp": 2}),
        ("nvme", "selective", 0, {"tp": 2, "every": 2}),
        ("cpu", "full", 3, {}),
        ("nvme", "none", 3, {}),
        ("cpu", "selective", 0, {"pp": 2}),
        ("nvme", "full", 0, {"pp": 2, "every": 2}),
        ("cpu", ("layernorm", "activation"), 0, {"tp": 2}),
        ("nvme", ("core_attn", "layernorm", "mlp"), 0, {"pp": 2}),
        ("cpu", ("layernorm", "activation"), 3, {}),
    ],
)
def test_is_bit_equal(ranks: Any, disk: Path, place: str, recompute: Any, stage: int, settings: dict[str, int]) -> None:
    away, here = (
        assemble(c, ranks(2, run, c, 2))
        for c in (config_of(disk, p, recompute, stage, **settings) for p in (place, "none"))
    )
    assert away.losses == here.losses and away.norms == here.norms
    assert all(torch.equal(away.weights[name], here.weights[name]) for name in here.weights)
    assert all(torch.equal(away.gradients[name], here.gradients[name]) for name in here.gradients)


def peak(config: Any) -> tuple[int, int]:
    """Most bytes alive in forward and backward, besides what is there before, and bytes that went to a disk. The
    optimizer comes after that: what it makes of all layers' weights at once is more than is left of activations."""
    from hpctrain.parallel import stash
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.sharding.build import build_engine

    mesh = make_mesh(config, 1)
    shelves = []
    make = stash.make_shelf
    import hpctrain.parallel.parallelize as module

    module.make_shelf = lambda *args: shelves.append(make(*args)) or shelves[-1]
    chunks, records = build_chunks(config, mesh)
    engine = build_engine(chunks, records, mesh, config)
    train_step(engine, mesh, config, 0)
    with LiveBytes() as live:
        before, step, until = live.now(), engine.step, []

        def stepped(lr: float) -> Any:
            until.append(live.peak)
            return step(lr)

        engine.step = stepped  # type: ignore[method-assign]
        train_step(engine, mesh, config, 1)
    disk = shelves[0]._disk.moved.written if shelves[0] else 0
    return until[0] - before, disk


def test_a_disk_makes_room(ranks: Any, disk: Path) -> None:
    """Of twelve layers three are there at most: one computes, one comes or goes, and what is copied is there twice; and
    gradients of all."""
    (less, moved), (all_of_it, none) = (
        ranks(1, peak, config_of(disk, place, "none", layers=12, tp=1))[0] for place in ("nvme", "none")
    )
    assert moved > all_of_it / 3 and none == 0
    assert less < 0.5 * all_of_it, (less, all_of_it)
