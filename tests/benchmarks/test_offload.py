"""The benchmark of offloading runs, on a model too small to say anything about speed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import offload
from benchmarks.rounds import Record, warm_up
from hpctrain.launch.local.zygote import Zygote
from hpctrain.layout.offload import DiskRates
from hpctrain.layout.units import MIB

TINY = ("model.layers=1", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.ffn=96", "model.vocab=512",
        "model.max_seq=16", "data.seq=8", "train.global_batch=4", "train.micro_batch=2")  # fmt: skip


def one_round(folder: Path) -> dict[str, Any]:
    warm_up(offload.IMPORTS)
    return offload.measure(TINY, 1, folder, MIB, DiskRates(1e9, 1e9, MIB // 4, 2))


def test_all_run(zygote: Zygote, tmp_path: Path) -> None:
    result = json.loads(json.dumps(zygote.run(one_round, 0, tmp_path)[0]))
    assert result["cannot_run"].keys() <= {offload.PEER}
    assert {offload.COMPUTES, *offload.PLACES} <= result["contenders"].keys()
    state, weights, everything = (result["contenders"][name] for name in offload.PLACES)
    for fact in (state, weights, everything):
        assert 0 < fact["over_sum"] <= fact["over_greater"] <= 2 * fact["over_sum"]
    assert 0 < state["written"] < weights["written"] < everything["written"]
    assert len(result["rows"]) == 3 * len(offload.PLACES)
    for what, measured, beside, ratio in result["rows"]:
        assert what.startswith("Llama, on NVMe: ") and re.fullmatch(r"\d+\.\d\d s", measured)
        assert re.fullmatch(r"\d+\.\d\d", ratio) or (ratio == "-" and "cannot run: " in beside)
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_bounds_by_hand() -> None:
    """1 s of computing; 2 GB read at 1 GB/s and 3 GB written at 0.5 GB/s take 8 s."""
    size = 10**9
    records = {
        offload.DISK: Record(counts=[{"reading": 1.0, "writing": 2.0}]),
        offload.COMPUTES: Record(seconds=[1.0]),
        "away": Record(seconds=[10.0], counts=[{"read": 2e9, "written": 3e9, "waited": 0.0}]),
    }
    found = offload.bounds(records, "away", size)
    assert found == [(1.0, pytest.approx(8.0))]
    assert offload._median([10.0], found, sum) == pytest.approx(10 / 9)
    assert offload._median([10.0], found, max) == pytest.approx(10 / 8)
