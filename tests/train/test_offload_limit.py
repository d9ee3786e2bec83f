"""A model four times the memory of its job trains from the disk, in a control group that holds it to that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.config.load import load
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.layout.offload import DiskRates
from hpctrain.layout.parameters import parameter_specs
from hpctrain.telemetry.disk import keep_rates
from hpctrain.telemetry.metrics import read_records
from hpctrain.telemetry.sinks import METRICS_FILE
from tests import cgroups

MIB = 1 << 20
LIMIT = 768 * MIB
STATE = 16
"""Bytes of an element in float32 that a run without offloading keeps: weight, gradient, two moments."""

NO_GROUP = cgroups.obstacle()

SHAPE = [
    "model.layers=34", "model.hidden=768", "model.heads=12", "model.ffn=2048", "model.max_seq=64", "data.seq=64",
    "parallel.tp=1", "train.steps=3", "train.global_batch=1", "train.micro_batch=1", "train.log_every=1",
    "train.eval_batches=0", "optimizer.lr=5e-5", "optimizer.warmup_steps=1", "optimizer.schedule=constant",
    "train.recompute=full", "checkpoint.every=0", "checkpoint.at_end=false",
    "cluster.gpus_per_node=1", "cluster.device=cpu", "cluster.threads=1",
]  # fmt: skip
AWAY = ["sharding.stage=3", *(f"sharding.offload.{what}=nvme" for what in ("optimizer", "params", "gradients"))]


def train(settings: list[str], limited: cgroups.Group | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpctrain", "train", "llama-tiny", *SHAPE, *settings]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    join = limited.join if limited else None
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, preexec_fn=join)


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_records(folder / METRICS_FILE) if r["kind"] == "train"]


@pytest.mark.skipif(bool(NO_GROUP) and not os.environ.get("CI"), reason=NO_GROUP or "none")
def test_a_model_of_four_times_its_memory(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_bytes(b"to be or not to be, that is the question " * (i + 30))
    build(tmp_path / "corpus.h5", list_sources([texts]), [texts])
    disk = tmp_path / "disk"
    disk.mkdir()
    keep_rates(disk, DiskRates(1e9, 1e9, MIB, 4))
    here = [f"folder={tmp_path}", f"data.corpus={tmp_path / 'corpus.h5'}"]

    config = load("llama-tiny", [*SHAPE, *here])
    assert STATE * sum(spec.numel for spec in parameter_specs(config.model)) >= 4 * LIMIT

    with cgroups.group(LIMIT) as limited:
        refused = train([*here, "name=refused"], limited)
        assert refused.returncode != 0 and not (tmp_path / "refused").exists(), refused.stdout
        needs = re.fullmatch(
            r"error: memory='([\d.]+) GiB': more than the ([\d.]+) GiB .*; use (.*)\.\n", refused.stderr
        )
        assert needs, refused.stderr
        assert float(needs[1]) >= 4 * LIMIT / 2**30 > float(needs[2])
        assert {"sharding.stage=3", "sharding.offload.optimizer=nvme"} <= {*needs[3].split()}

    with cgroups.group(LIMIT) as limited:
        done = train([*here, "name=away", f"sharding.offload.path={disk}", *AWAY], limited)
        assert done.returncode == 0, done.stderr
        assert limited.kills() == 0
    whole = train([*here, "name=whole"])
    assert whole.returncode == 0, whole.stderr
    got, want = losses(tmp_path / "away"), losses(tmp_path / "whole")
    assert len(got) == 3 and got[-1] < got[0] - 0.5
    # float32 adds in another order; AdamW enlarges the rounding of small gradients in its first steps.
    assert np.allclose(got, want, rtol=2e-5, atol=0), (got, want)
