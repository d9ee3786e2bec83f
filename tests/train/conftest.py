"""A corpus and a run on it."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.config.schema import RunConfig
from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from tests.train.driving import STEPS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of random lengths and few letters, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(60):
        (folder / f"{i}.txt").write_bytes(bytes(rng.choice(list(b"abcd \n"), rng.integers(20, 400))))
    build(folder / "corpus.h5", list_sources([folder]), [folder])
    return folder / "corpus.h5"


@pytest.fixture
def make(corpus, tmp_path):
    def config(**sections) -> RunConfig:
        base = dict(
            model=dict(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=40, max_seq=32, dropout=0.1),
            data=dict(corpus=str(corpus), seq=31, validation=0.1),
            optimizer=dict(lr=3e-3, warmup_steps=2),
            train=dict(steps=STEPS, global_batch=8, micro_batch=2, log_every=1, eval_batches=2, precision="float64"),
            checkpoint=dict(every=3),
        )
        merged = {k: {**base.get(k, {}), **sections.get(k, {})} for k in {*base, *sections}}
        return RunConfig.model_validate({**merged, "name": "run", "folder": str(tmp_path)})

    return config
