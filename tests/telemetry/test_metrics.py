"""Records and their JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.telemetry import metrics
from hpctrain.telemetry.metrics import EvalMetrics, Record, StepMetrics, StepTime, event, from_json, read_records

STEP = StepMetrics(
    step=20,
    loss=2.89959,
    grad_norm=0.9573,
    lr=9.8e-4,
    tps=7375.2,
    mfu_palm=None,
    mfu_causal=None,
    memory_gib=0.9,
    memory_kind="rss",
    consumed_samples=320,
    consumed_tokens=81920,
    skipped_steps=0,
    loss_scale=None,
    engine="none",
    time=StepTime(2.0, 0.02, 1.5, 0.24, 0.2),
)

VALUES = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=9)


def test_a_step_is_flat_and_every_key_is_documented() -> None:
    train, evaluation = STEP.record(), EvalMetrics(20, 2.5, 1000, 0.1).record()
    assert train["kind"] == "train" and evaluation["kind"] == "eval"
    assert train["time/communication"] == 0.24 and train["time/step"] == 2.0
    assert "time" not in train and len(train) == 21
    assert metrics.__doc__ is not None
    for key in {**train, **evaluation, **event("start", 0)}:
        assert f"`{key}`" in metrics.__doc__, key


def test_routers_stand_beside_the_rest() -> None:
    loads = {"moe/aux_loss": 1.02, "moe/z_loss": 4.5, "moe/dropped_tokens": 3.0, "moe/load_imbalance": 1.4}
    train = replace(STEP, moe={**loads, "moe/load_imbalance_layer_3": 1.4}).record()
    assert {key: train[key] for key in loads} == loads and "moe" not in train
    assert metrics.__doc__ is not None
    assert all(f"`{key}`" in metrics.__doc__ for key in (*loads, "moe/load_imbalance_layer_N"))


def test_numbers_that_json_lacks_are_written_in_words_and_come_back() -> None:
    record: Record = {"kind": "train", "step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf}
    text = metrics.to_json(record)
    strict = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert strict["loss"] == "NaN" and strict["grad_norm"] == "Infinity" and strict["lr"] == "-Infinity"
    back = from_json(text)
    assert back is not None and math.isnan(float(back["loss"] or 0))
    assert back["grad_norm"] == math.inf and back["lr"] == -math.inf


@given(st.dictionaries(st.text(min_size=1, max_size=9), VALUES))
def test_one_line_there_and_back(values: Record) -> None:
    record: Record = {**values, "kind": "train"}
    text = metrics.to_json(record)
    assert "\n" not in text
    assert metrics.to_json(from_json(text) or {}) == text


@pytest.mark.parametrize("text", ["", "{", '{"kind": "train"', "[1]", "3", '{"step": 1}', b"\xff\x00", "null"])
def test_what_is_no_record(text: str | bytes) -> None:
    assert from_json(text) is None


def test_reading_passes_over_torn_lines(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tr\n\xff\n{"kind": "eval", "step": 2}\n{"kind": "tra')
    assert [r["step"] for r in read_records(file)] == [1, 2]
