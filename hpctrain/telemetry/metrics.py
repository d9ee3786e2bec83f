"""What is recorded of a run: one flat record a logged step, evaluation or event, and its JSON form.

| key | unit | meaning |
|---|---|---|
| `kind` | | `train`, `eval` or `event` |
| `time` | ISO 8601, UTC | when it was written; set by the sink |
| `step` | | optimizer steps done, counted from 1; the first step is logged |
| `loss` | nats a token | of this step: sum over valid tokens / valid tokens of the global batch |
| `grad_norm` | | global, before clipping |
| `lr` | | learning rate of this step |
| `tps` | tokens/s/device | all positions of the global batch / seconds / ranks (torchtitan's tps) |
| `mfu_palm`, `mfu_causal` | share of 1 | see `telemetry.flops`; null where the device's peak is not known |
| `memory_gib` | GiB = 2^30 | peak so far, of the rank that has the highest |
| `memory_kind` | | what that is: `cuda` allocated, or `rss` |
| `time/step` | seconds | wall time of a step |
| `time/data` | seconds | of it, waiting for a batch |
| `time/compute` | seconds | of it, forward and backward, without waiting for other ranks |
| `time/communication` | seconds | of it, waiting for other ranks, in whatever phase |
| `time/optimizer` | seconds | of it, clipping and update |
| `time/hidden` | seconds | that collectives were under way before they were waited for, added up |
| `consumed_samples`, `consumed_tokens` | | since the beginning of training, over all ranks |
| `skipped_steps` | | steps skipped so far because the loss or gradient was not finite |
| `loss_scale` | | fp16 only, else null |
| `moe/aux_loss` | | balance loss of this step without its weight, mean of a token and a layer; 1 at an even load |
| `moe/z_loss` | | squared log-partition of the routers' logits, likewise |
| `moe/dropped_tokens` | | choices of an expert in this step that were above its capacity, over all layers |
| `moe/load_imbalance` | | tokens sent to the busiest expert, over the mean; of the layer where that is largest |
| `moe/load_imbalance_layer_N` | | the same of layer N, counted from 0 |
| `data/epochs_N` | | of a blend: how often corpus N of it was read so far, counted from 0 |
| `engine` | | sharding engine and stage, for example `deepspeed-2` |
| `eval_tokens`, `eval_seconds` | , seconds | eval only: valid tokens averaged over, and what it took |
| `unigram_entropy` | nats a token | eval only: of the corpus, to compare the loss with; null if not known |
| `event`, `message` | | event only: its name and a sentence |

Rates and times are means over the steps since the previous record. What torchtitan, Megatron-LM and nanotron
agree on is named as there (`loss`, `grad_norm`, `lr`, `tps`, `consumed_samples`, `skipped_steps`, `loss_scale`;
`moe/` and `_layer_N` are Megatron-LM's). Records of models with experts alone have `moe/`; tokens that count in no
loss count in nothing there.

JSON has no NaN: what is not finite is written as "NaN", "Infinity" or "-Infinity" and read back as a float.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.telemetry.meter import Meter

Value = float | int | str | bool | None
Record = dict[str, Value]

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class StepTime:
    """Where the wall time of a step went, seconds. What is missing to `step` is the loop itself; `hidden` is no part of
    it, but of what ran beside."""

    step: float
    data: float
    compute: float
    communication: float
    optimizer: float
    hidden: float = 0.0

    @classmethod
    def of(cls, meter: Meter, seconds: float, steps: int) -> StepTime:
        """Mean over `steps` steps that took `seconds` together, of which `meter` has the phases."""

        def spent(*phases: str) -> float:
            return sum(meter.seconds.get(phase, 0.0) for phase in phases)

        computed = spent("forward", "backward")
        parts = (seconds, spent("data"), computed, meter.communication(), spent("optimizer"), meter.hidden())
        return cls(*(part / steps for part in parts))


@dataclass(frozen=True)
class StepMetrics:
    """One logged training step. Names and units are in the module's table."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tps: float
    mfu_palm: float | None
    mfu_causal: float | None
    memory_gib: float
    memory_kind: str
    consumed_samples: int
    consumed_tokens: int
    skipped_steps: int
    loss_scale: float | None
    engine: str
    time: StepTime
    moe: dict[str, float] = field(default_factory=dict)
    data: dict[str, float] = field(default_factory=dict)

    def record(self) -> Record:
        """The flat form."""
        flat = asdict(self)
        times, moe, data = flat.pop("time"), flat.pop("moe"), flat.pop("data")
        return {"kind": "train", **flat, **moe, **data, **{f"time/{name}": value for name, value in times.items()}}


@dataclass(frozen=True)
class EvalMetrics:
    """One evaluation. Names and units are in the module's table."""

    step: int
    loss: float
    eval_tokens: int
    eval_seconds: float
    unigram_entropy: float | None = None

    def record(self) -> Record:
        """The flat form."""
        return {"kind": "eval", **asdict(self)}


def event(name: str, step: int, message: str = "", **facts: Value) -> Record:
    """Something that happened after `step` steps: `start`, `resume`, `checkpoint`, `skip`, `end`, ..."""
    return {"kind": "event", "step": step, "event": name, "message": message, **facts}


def to_json(record: Record) -> str:
    """One line of valid JSON, without the line's end."""

    def plain(value: Value) -> Value:
        if not isinstance(value, float) or math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

    return json.dumps({key: plain(value) for key, value in record.items()}, allow_nan=False)


def from_json(line: str | bytes) -> Record | None:
    """The record of a line, or None if it is none: torn by a crash, or not ours."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or "kind" not in found:
        return None
    return {key: NON_FINITE.get(value, value) if isinstance(value, str) else value for key, value in found.items()}


def read_records(path: Path) -> Iterator[Record]:
    """All records of a file of lines, in order; what is no record is passed over."""
    with path.open("rb") as lines:
        for line in lines:
            record = from_json(line)
            if record is not None:
                yield record
