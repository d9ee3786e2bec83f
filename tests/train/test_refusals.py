"""What a run refuses to begin with."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpctrain.launch.local.zygote import RankFailure
from hpctrain.train.session import open_session
from tests.train.driving import drive


def test_another_model_or_tokenizer_is_refused_in_words(ranks, make):
    ranks(1, drive, make(train=dict(steps=3)), 1)
    with pytest.raises(RankFailure, match=r"CheckpointError: .* is of another model: model\.ffn was 40 and is 48"):
        ranks(1, drive, make(model=dict(ffn=48)), 1)
    with pytest.raises(RankFailure, match=r"model\.activation was swiglu and is gelu"):
        ranks(1, drive, make(model=dict(activation="gelu")), 1)
    manifest = next(make().run_folder.glob("checkpoints/step-*/manifest.json"))
    assert json.loads(manifest.read_text())


def test_starting_anew_over_an_older_run_is_refused(ranks, make):
    ranks(1, drive, make(train=dict(steps=3)), 1)
    with pytest.raises(RankFailure, match=r"checkpoint\.resume='never': .* already holds checkpoints"):
        ranks(1, drive, make(checkpoint=dict(resume="never")), 1)


def test_a_missing_corpus_on_one_rank_stops_all_at_once(ranks, make):
    begun = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        ranks(2, open_without_corpus_on, make(), 1)
    assert time.monotonic() - begun < 30
    assert str(caught.value).count("DataError: ") >= 2 and "nowhere" in str(caught.value)


def open_without_corpus_on(config, rank):
    if dist.get_rank() == rank:
        config = config.model_copy(update={"data": config.data.model_copy(update={"corpus": Path("/nowhere.h5")})})
    open_session(config, torch.device("cpu"), 2)


def test_a_missing_disk_on_one_rank_stops_all_at_once(ranks, make):
    away = dict(stage=1, offload=dict(optimizer="nvme"))
    with pytest.raises(RankFailure) as caught:
        ranks(2, open_without_disk_on, make(sharding=away), 1)
    assert str(caught.value).count("ConfigError: sharding.offload.path='/nowhere': is no folder") >= 2


def open_without_disk_on(config, rank):
    if dist.get_rank() == rank:
        os.environ["TMPDIR"] = "/nowhere"
    open_session(config, torch.device("cpu"), 2)
