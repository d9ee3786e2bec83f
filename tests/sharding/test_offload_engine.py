"""Offloaded state trains as state on the device does: every stage, place, tp and pp against engine `none`.

Sizes are odd, so that no partition is aligned by accident; state is larger than a chunk, and that it went through the
disk is counted. Tolerances as in `test_deepspeed_pipeline.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.config.schema import RunConfig
from hpctrain.layout.offload import DiskRates
from hpctrain.telemetry.disk import keep_rates
from tests.training import Trace, assemble, compare, make_config, run

MODEL = {"layers": 4, "hidden": 21, "ffn": 70, "vocab": 331, "tied": True}
"""Its state is 20 to 60 chunks of a rank."""


def config_of(path: Path, stage: int, tp: int, pp: int, offload: dict[str, Any], **train: Any) -> RunConfig:
    on_disk = "nvme" in offload.values()
    return make_config(
        model=MODEL,
        data={"seq": 13},
        parallel={"tp": tp, "pp": pp},
        train={"precision": "float32", "global_batch": 4, "micro_batch": 1, **train},
        sharding={"stage": stage, "bucket_mib": 0.005, "offload": offload | ({"path": str(path)} if on_disk else {})},
    )


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose disk is known, so that nobody measures it; small blocks, so that a chunk is many."""
    folder = tmp_path_factory.mktemp("disk")
    keep_rates(folder, DiskRates(1e9, 1e9, 4096, 3))
    return folder


OF_NONE: dict[tuple[int, int, str], Trace] = {}


def of_none(ranks: Any, path: Path, tp: int, pp: int, precision: str = "float32") -> Trace:
    key = tp, pp, precision
    if key not in OF_NONE:
        config = config_of(path, 0, tp, pp, {}, precision=precision)
        OF_NONE[key] = assemble(config, ranks(2 * tp * pp, run, config, 2 * tp * pp))
        OF_NONE[key].gradients.clear()
    return OF_NONE[key]


AXES = ((1, 1), (1, 2), (2, 1), (2, 2))
"""tp and pp."""

PLACES = {
    "cpu": {"optimizer": "cpu"},
    "nvme": {"optimizer": "nvme"},
    "params-cpu": {"optimizer": "cpu", "params": "cpu"},
    "params-nvme": {"optimizer": "nvme", "params": "nvme"},
    "all-nvme": {"optimizer": "nvme", "params": "nvme", "gradients": "nvme"},
    "mixed": {"optimizer": "cpu", "params": "nvme"},
    "params-only": {"params": "nvme"},
    "shares": {
        "optimizer": "nvme", "optimizer_share": 0.6, "params": "nvme", "params_share": 0.5, "gradients": "nvme",
    },
    "share-cpu": {"optimizer": "cpu", "optimizer_share": 0.3},
}  # fmt: skip


ON_HOST_AND_DISK = {1: ("cpu", "nvme"), 2: ("cpu", "nvme"), 3: ("params-cpu", "all-nvme")}
"""All that a stage can have away, in memory of the host and on the disk."""

CASES = [
    *((stage, name, tp, pp) for stage, names in ON_HOST_AND_DISK.items() for name in names for tp, pp in AXES),
    *((3, name, 2, 2) for name in ("cpu", "mixed", "shares")),
    *((3, name, 1, 1) for name in ("nvme", "shares", "share-cpu")),
    (1, "share-cpu", 2, 2),
    (3, "params-nvme", 2, 1),
    (3, "params-only", 1, 2),
]
"""Every stage with all that it can have away under every layout; parts of it under some."""


@pytest.mark.parametrize(("stage", "name", "tp", "pp"), CASES)
def test_equals_engine_none(ranks: Any, disk: Path, stage: int, name: str, tp: int, pp: int) -> None:
    config = config_of(disk, stage, tp, pp, PLACES[name])
    world = 2 * tp * pp
    got = assemble(config, ranks(world, run, config, world))
    want = of_none(ranks, disk, tp, pp)
    assert np.allclose(got.losses, want.losses, rtol=2e-6, atol=0)
    assert np.allclose(got.norms, want.norms, rtol=2e-6, atol=0)
    compare(got, want, 1e-4)
    assert not [path for path in disk.iterdir() if not path.name.endswith(".json")], "nothing is left"


@pytest.mark.parametrize(("name", "every"), [("params-only", 1), ("all-nvme", 2)])
def test_one_rank_recomputes_with_the_weights_that_it_read(ranks: Any, disk: Path, name: str, every: int) -> None:
    """Of a rank that holds all of a weight nothing is gathered: it computes in the buffer that was read into, and what
    is computed again keeps that for backward, when the weight itself was let go."""
    config, plain = (
        config_of(disk, stage, 1, 1, away, recompute="full", recompute_every=every)
        for stage, away in ((3, PLACES[name]), (0, {}))
    )
    got, want = (assemble(c, ranks(1, run, c, 1)) for c in (config, plain))
    assert np.allclose(got.norms, want.norms, rtol=2e-6, atol=0)
    want.gradients.clear()
    compare(got, want, 1e-4)


def moved(config: RunConfig, world: int) -> Any:
    """What a rank's disk moved in its third step, what the formula says, and how large its files are."""
    from hpctrain.layout.offload import elsewhere
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine
    from tests.training import make_mesh, train_step

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh)
    engine = build_engine(chunks, records, mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    for step in range(2):
        train_step(engine, mesh, config, step, pipeline)
    store: Any = engine._store
    disk = store._home.disk
    before = type(disk.moved)(disk.moved.read, disk.moved.written)
    train_step(engine, mesh, config, 2, pipeline)
    now = disk.moved.since(before)
    held = [slot.numel for slot in store.row.slots.values()]
    batches = config.train.global_batch // (mesh.dp.size * config.train.micro_batch)
    rates, host = store._home.rates, store._home.host
    said = elsewhere(config, held, 0, 0, 0, batches, rates, host, float(config.train.recompute == "full"))
    files = store.states._far.file.size if store.states._far else 0
    weights = getattr(store, "_weights", None)
    return now, said, files + (weights._file.size if weights else 0)


@pytest.mark.parametrize(
    ("stage", "name", "recompute"),
    [
        (1, "nvme", "none"),
        (2, "nvme", "none"),
        (3, "nvme", "none"),
        (3, "params-nvme", "none"),
        (3, "all-nvme", "full"),
        (3, "shares", "full"),
    ],
)
def test_what_moves_is_the_formula(ranks: Any, disk: Path, stage: int, name: str, recompute: str) -> None:
    """All state that is to be on the disk is there, however small its parts are, and every byte of it moves once."""
    config = config_of(disk, stage, 1, 1, PLACES[name], micro_batch=2, recompute=recompute)
    for now, said, files in ranks(2, moved, config, 2):
        on_drive = config.sharding.offload.params == "nvme"
        vectors = 9 * 2048 * 4 * on_drive  # norms stay gathered: they are on no disk
        part = name == "shares"  # what is near and what far goes by whole chunks and partitions
        assert abs(files - said.disk) <= vectors + part * said.disk / 5, (files, said.disk)
        assert abs(now.written - said.written) <= vectors + part * said.written / 5, (now, said)
        # What is there at the turn from forward to backward, here the embedding and a matrix, is not read again.
        turn = 3 * vectors * 2 + (part or on_drive) * said.read / 5
        assert -part * said.read / 5 <= said.read - now.read <= turn, (now, said)


def test_micro_batches_are_summed_in_float32(ranks: Any, disk: Path) -> None:
    """bf16: the norm of the first step is that of ZeRO without offloading. Summed in bf16 it would be off by 1e-3."""
    for stage, name in ((1, "nvme"), (2, "cpu"), (3, "nvme")):
        here, there = (
            ranks(2, run, config_of(disk, stage, 1, 1, offload, precision="bf16"), 2, 1)[0][1][0]
            for offload in ({}, PLACES[name])
        )
        assert there == pytest.approx(here, rel=1e-6), (stage, name)


def with_evaluations(config: RunConfig, world: int) -> Any:
    """Losses of training and of evaluations between steps, in which modules are fetched in another order."""
    from hpctrain.parallel.parallelize import build_chunks
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine
    from hpctrain.verify.samples import global_batch
    from tests.training import make_mesh, train_step

    mesh = make_mesh(config, world)
    chunks, records = build_chunks(config, mesh)
    engine = build_engine(chunks, records, mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    out = []
    for step in range(4):
        batch = global_batch(config, step)
        mine = batch.split(config.train.global_batch // mesh.dp.size)[mesh.dp.index]
        out.append(float(pipeline.evaluate(mine.split(config.train.micro_batch))))
        out.append(train_step(engine, mesh, config, step, pipeline)[0])
    return out, {name: engine.values(name) for name in list(records)[:3]}


@pytest.mark.parametrize(("name", "pp"), [("params-cpu", 2), ("all-nvme", 1)])
def test_evaluations_between_steps(ranks: Any, disk: Path, name: str, pp: int) -> None:
    want, got = (
        ranks(2 * pp, with_evaluations, config_of(disk, stage, 1, pp, offload), 2 * pp)
        for stage, offload in ((0, {}), (3, PLACES[name]))
    )
    for (losses, values), (expected, others) in zip(got, want):
        assert np.allclose(losses, expected, rtol=2e-6, atol=0)
        assert all(np.allclose(values[n], others[n], rtol=0, atol=1e-5) for n in others)
