"""Training from blends and packed documents, what a checkpoint says of them, and a filesystem that stalls."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain.data.bpe import train_bpe
from hpctrain.data.build import build
from hpctrain.data.samples import Windows
from hpctrain.data.sources import list_sources
from hpctrain.errors import CheckpointError
from hpctrain.telemetry.metrics import read_records
from hpctrain.telemetry.sinks import METRICS_FILE
from hpctrain.train.generate import _tokenizer_files
from hpctrain.train.progress import position
from hpctrain.train.run import _keep_tokenizer
from tests.train.driving import drive, evaluations, losses


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("three"), []
    rng = np.random.default_rng(3)
    for name in "abc":
        (folder / name).mkdir()
        for n in range(60):
            (folder / name / f"{n}.txt").write_bytes(rng.bytes(int(rng.integers(20, 90))))
        build(folder / f"{name}.h5", list_sources([folder / name]), [])
        paths.append(str(folder / f"{name}.h5"))
    return paths


def blend(three, **more):
    return dict(blend=three, weights=[5, 3, 2], anneal=["24 1 0 1"], seq=28, **more)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_a_blend_has_the_same_losses_on_any_layout_and_after_a_stop(ranks, make, tmp_path, three, packing):
    curves = {}
    for name, parallel, world, workers in (("one", {}, 1, 1), ("dp2", {}, 2, 3), ("tp2cp2", dict(tp=2, cp=2), 4, 1)):
        config = make(parallel=parallel, data=blend(three, packing=packing, workers=workers, prefetch=3))
        config = config.model_copy(update={"folder": tmp_path / name})
        if name == "dp2":
            ranks(world, drive, config, world, 4)  # it ends after step 4, and goes on from the checkpoint of step 3
        ranks(world, drive, config, world)
        curves[name] = [*losses(config).values(), *evaluations(config)]
    assert len(curves["one"]) == 7
    for name, curve in curves.items():
        assert np.allclose(curve, curves["one"], rtol=1e-9, atol=0), name
    last = [r for r in read_records(tmp_path / "one" / "run" / METRICS_FILE) if r["kind"] == "train"][-1]
    assert last["consumed_samples"] == 48 and 0 < last["data/epochs_1"] < last["data/epochs_2"] < last["data/epochs_0"]


def stalled(config, world):
    """One life on a filesystem that takes a second for every read, longer than a step takes on any machine."""
    real = Windows.take

    def take(self, which):
        time.sleep(1.0)
        return real(self, which)

    Windows.take = take
    return drive(config, world)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_filesystem_that_stalls_is_data_time(ranks, make, prefetch):
    config = make(data=dict(prefetch=prefetch), train=dict(steps=3, eval_batches=0, global_batch=2))
    ranks(1, stalled, config, 1)
    steps = [r for r in read_records(config.run_folder / METRICS_FILE) if r["kind"] == "train"]
    assert len(steps) == 3
    for step in steps[1:]:
        assert step["time/data"] > 0.1 and step["time/data"] > step["time/compute"], step


SOUND = {
    "progress": {"step": 3, "samples": 24, "tokens": 5, "skipped": 0, "evaluated": 3},
    "config": {"model": {}, "data": {}, "train": {"seed": 0, "steps": 5}},
    "corpus": {"sha256": "a", "tokenizer": "b", "tokenizer_sha256": "c"},
}


def found(**change):
    return SimpleNamespace(path=Path("step-3"), extra={**SOUND, **change})


def test_position_of_a_sound_checkpoint():
    assert position(found()).samples == 24
    assert position(found(progress={"step": 3, "samples": 24})).evaluated == 0  # of old


@pytest.mark.parametrize(
    "change",
    [
        {"progress": None}, {"progress": {"steps": 3}}, {"progress": {"samples": "24"}}, {"progress": {"samples": -1}},
        {"config": []}, {"config": {"model": {}}}, {"config": {**SOUND["config"], "train": {}}},
        {"corpus": "x"}, {"corpus": {"sha256": 5}},
    ],
)  # fmt: skip
def test_position_that_is_odd_is_one_sentence(change):
    with pytest.raises(CheckpointError, match="step-3 is not of a training run"):
        position(found(**change))


def test_the_tokenizer_of_a_run_stays_with_its_weights(make, tmp_path):
    (tmp_path / "a.txt").write_text("some words")
    tokenizer = train_bpe([b"some words"], 260)
    build(tmp_path / "a.h5", list_sources([tmp_path / "a.txt"]), [], tokenizer=tokenizer)
    from hpctrain.data.corpus import Corpus

    data = SimpleNamespace(corpora=[Corpus.open(tmp_path / "a.h5")])
    run = tmp_path / "run" / "checkpoints" / "step-1"
    run.mkdir(parents=True)
    _keep_tokenizer(data, tmp_path / "run")
    gone = make(data=dict(corpus=str(tmp_path / "gone.h5")))
    for folder in (run, tmp_path / "run"):
        assert list(_tokenizer_files(gone, folder)) == [tokenizer.json]
    assert list(_tokenizer_files(make(data=dict(corpus=str(tmp_path / "a.h5"))), tmp_path / "other")) == [
        tokenizer.json
    ]
