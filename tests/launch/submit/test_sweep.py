"""From words on the command line to the configurations of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.launch.submit.sweep import anchored, sweep


def test_paths_hold_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = anchored(
        load(
            "gpt-tiny", ["checkpoint.continue_from=runs/old", "checkpoint.base=b", "data.corpus=~/c.h5", "folder=../x"]
        )
    )
    assert config.folder == tmp_path.parent / "x"
    assert config.data.corpus == Path(os.environ["HOME"]) / "c.h5"
    assert config.checkpoint.continue_from == tmp_path / "runs" / "old", "named, not resolved"
    assert config.checkpoint.base == tmp_path / "b"
    assert anchored(config) == config
    assert anchored(load("gpt-tiny")).checkpoint.continue_from is None


def test_one_axis_and_two(tmp_path: Path) -> None:
    one = sweep("gpt-tiny", [f"folder={tmp_path}"], ["optimizer.lr=1e-3, 3e-4"])
    assert [(c.run_folder, c.optimizer.lr) for c in one] == [
        (tmp_path / "gpt-tiny" / "lr-1e-3", 1e-3),
        (tmp_path / "gpt-tiny" / "lr-3e-4", 3e-4),
    ]
    two = sweep("gpt-tiny", [f"folder={tmp_path}"], ["train.seed=1,2", "optimizer.schedule=cosine,constant"])
    assert [c.name for c in two] == [
        *("seed-1_schedule-cosine", "seed-1_schedule-constant", "seed-2_schedule-cosine", "seed-2_schedule-constant")
    ]
    assert two[3].train.seed == 2 and two[3].optimizer.schedule == "constant"


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("optimizer.lr", "must be written KEY=v1,v2"),
        ("optimizer.lr=", "must be written KEY=v1,v2"),
        ("optimizer.lr=1e-3,,2", "must be written KEY=v1,v2"),
        ("optimizer.lr=1e-3,1e-3", "two elements would have this run folder; give each value once"),
        ("optimizer.lr=1e-3,fast", r"optimizer\.lr='fast'"),
        ("optimiser.lr=1,2", "there is no such key"),
        ("name=a,b", "name is made from the values"),
        ("cluster.nodes=1,2", r"cluster\.nodes='1, 2': elements of one job array have it alike; submit them apart"),
        ("train.seed=" + ",".join(map(str, range(1001))), "a job array has at most 1000 elements"),
    ],
)
def test_what_is_no_sweep(axis: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweep("gpt-tiny", [], [axis])


def test_names_of_odd_values_are_names_of_files() -> None:
    (config,) = sweep("gpt-tiny", [], ["data.corpus=/data/a b/c.h5"])
    assert config.name == "corpus-data-a-b-c.h5"
