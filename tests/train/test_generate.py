"""Ranks that generate keep to the limits of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.train import generate
from tests.training import make_config


def test_limits_of_the_cluster_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Begun(Exception):
        pass

    def group(*arguments: Any) -> None:
        raise Begun(*arguments[3::2])

    monkeypatch.setattr(generate, "process_group", group)
    config = make_config(cluster={"timeout_s": 77, "silence_s": 7})
    with pytest.raises(Begun) as begun:
        generate.generate_main(config.model_dump(mode="json"), tmp_path, "", generate.Sampling())
    assert begun.value.args == (77.0, 7.0)
