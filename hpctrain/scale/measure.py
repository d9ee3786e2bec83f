"""What the runs of a study have measured, out of their records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from hpctrain.config.schema import RunConfig
from hpctrain.plan.scaling import Mean, Point, blocks, mean_of
from hpctrain.scale.study import Study
from hpctrain.telemetry.flops import flops_per_token
from hpctrain.telemetry.metrics import Record, read_records
from hpctrain.telemetry.sinks import METRICS_FILE

PARTS = {
    "compute": "time/compute",
    "waiting for others": "time/communication",
    "optimizer": "time/optimizer",
    "data": "time/data",
}
"""What a step is made of, by the keys of its record; what is missing is called rest."""


def steps_of(run: RunConfig) -> list[Record]:
    """Records of a run's steps, in order; none before it has begun."""
    path = run.run_folder / METRICS_FILE
    return [r for r in read_records(path) if r["kind"] == "train"] if path.exists() else []


def done(run: RunConfig) -> bool:
    """Whether a run has done all its steps."""
    found = steps_of(run)
    last = found[-1].get("step") if found else 0
    return isinstance(last, (int, float)) and last >= run.train.steps


def missing(study: Study, nodes: int) -> tuple[RunConfig, ...]:
    """Runs of a size that are not done."""
    return tuple(run for run in study.runs(nodes) if not done(run))


def point(study: Study, nodes: int, peak: float | None = None) -> Point | None:
    """What a size has measured; None before one of its runs is done.

    Of several runs the means of each count, of one alone those of blocks of its steps.

    Args:
        peak: FLOP/s of a device that MFU is counted against.
    """
    found = [kept for run in study.runs(nodes) if done(run) and (kept := _after(study, steps_of(run)))]
    if not found:
        return None
    size = study.size(nodes)
    devices = size.cluster.nodes * size.cluster.gpus_per_node
    tokens = size.train.global_batch * size.data.seq
    seconds, exposed = _mean(found, "time/step"), _mean(found, "time/communication")
    parts = {name: _mean(found, key).value for name, key in PARTS.items()}
    parts["rest"] = max(0.0, seconds.value - sum(parts.values()))
    mfu = None
    if peak is not None:
        flops = flops_per_token(size.model, size.data.seq).causal
        mfu = tokens / seconds.value * flops / (devices * peak)
    return Point(nodes, devices, tokens, seconds, exposed, parts, mfu, len(found), sum(map(len, found)))


def _after(study: Study, records: Sequence[Record]) -> list[Record]:
    """Those after the warm-up."""
    return [r for r in records if isinstance(r["step"], (int, float)) and r["step"] > study.warm_up]


def _mean(runs: Sequence[Sequence[Record]], key: str) -> Mean:
    values = [[float(r[key]) for r in run if isinstance(r.get(key), (int, float))] for run in runs]  # type: ignore[arg-type]
    if not all(values):
        return Mean(0.0)
    if len(values) > 1:
        return mean_of([statistics.fmean(each) for each in values])
    return mean_of(blocks(values[0]))


def points(study: Study, peak: float | None = None) -> list[Point]:
    """All sizes that are measured, the smallest first."""
    return [found for nodes in study.nodes if (found := point(study, nodes, peak)) is not None]


def folders(study: Study) -> list[Path]:
    """Of all runs."""
    return [run.run_folder for nodes in study.nodes for run in study.runs(nodes)]
