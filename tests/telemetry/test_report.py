"""Pictures."""

from __future__ import annotations

import math
from pathlib import Path

from hpctrain.telemetry.metrics import Record, to_json
from hpctrain.telemetry.report import curve, loss_curve

RECORDS: list[Record] = [
    {"kind": "event", "step": 0, "event": "start"},
    {"kind": "train", "step": 1, "loss": 5.0},
    {"kind": "train", "step": 2, "loss": math.nan},
    {"kind": "train", "step": 3, "loss": None},
    {"kind": "eval", "step": 3, "loss": 4.0},
]


def test_curves() -> None:
    steps, values = curve(RECORDS, "train")
    assert steps == [1, 2] and values[0] == 5.0 and math.isnan(values[1])
    assert curve(RECORDS, "eval") == ([3], [4.0])


def test_picture(tmp_path: Path) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text("".join(to_json(r) + "\n" for r in RECORDS[:1]))
    assert not loss_curve(metrics, picture) and not picture.exists()
    metrics.write_text("".join(to_json(r) + "\n" for r in RECORDS))
    assert loss_curve(metrics, picture, unigram_entropy=4.5)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    with_line = picture.read_bytes()
    assert loss_curve(metrics, picture) and picture.read_bytes() != with_line
