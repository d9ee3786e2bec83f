"""When a run is done."""

from __future__ import annotations

import os

import pytest

from hpctrain.checkpoint.manifest import FOLDER
from hpctrain.launch.local.zygote import RankFailure
from hpctrain.telemetry.sinks import METRICS_FILE
from hpctrain.train.finished import finished
from tests.train.driving import STEPS, drive, evaluations


def as_a_link_of_a_chain(config):
    """What a rank that finds the run done makes of it, and whether it built anything."""
    from hpctrain.train import session
    from hpctrain.train.run import rank_main

    def refuse(*_):
        raise AssertionError("it builds a model")

    session.open_session = refuse
    return rank_main(config.model_dump(mode="json"), False)


def test_a_rank_that_finds_the_run_done_builds_nothing(ranks, make):
    config = make()
    ranks(1, drive, config, 1, 5)
    assert finished(config) is None
    with pytest.raises(RankFailure, match="it builds a model"):
        ranks(0, as_a_link_of_a_chain, config)
    ranks(1, drive, config, 1)
    before = (config.run_folder / METRICS_FILE).read_bytes()
    (summary,) = ranks(0, as_a_link_of_a_chain, config)
    assert (summary.steps, summary.steps_now, summary.stopped) == (STEPS, 0, False)
    assert summary.loss == evaluations(config)[-1] and summary.unigram_entropy > 0
    assert (config.run_folder / METRICS_FILE).read_bytes() == before


@pytest.mark.parametrize(
    "sections", [dict(train=dict(steps=7)), dict(model=dict(dropout=0.2)), dict(checkpoint=dict(resume="never"))]
)
def test_a_run_under_other_settings_is_not_done(ranks, make, sections):
    ranks(1, drive, make(), 1)
    assert finished(make()) is not None
    assert finished(make(cluster=dict(nodes=3))) is not None
    assert finished(make(**sections)) is None


def test_a_run_is_not_done_before_it_is_saved_whole_and_evaluated(ranks, make):
    config = make()
    assert finished(config) is None
    ranks(1, drive, config, 1)
    metrics = config.run_folder / METRICS_FILE
    text = metrics.read_text()
    metrics.write_text("".join(line for line in text.splitlines(True) if '"eval"' not in line))
    assert finished(config) is None
    metrics.write_text(text)
    part = next((config.run_folder / FOLDER).glob(f"step-*{STEPS}/*.safetensors"))
    os.truncate(part, 10)
    assert finished(config) is None
    part.unlink()
    assert finished(config) is None
