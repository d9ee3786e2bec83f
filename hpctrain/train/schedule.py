"""The learning rate of every step, as a pure function: nothing to save, and a resumed run continues it."""

from __future__ import annotations

import math

from hpctrain.config.schema import OptimizerConfig, TrainConfig


def peak_lr(optimizer: OptimizerConfig, train: TrainConfig) -> float:
    """The highest learning rate: `lr`, scaled by the rule for another global batch than it was chosen for."""
    if not optimizer.base_global_batch:
        return optimizer.lr
    ratio = train.global_batch / optimizer.base_global_batch
    return optimizer.lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optimizer.batch_rule]


def learning_rate(optimizer: OptimizerConfig, train: TrainConfig, step: int) -> float:
    """The learning rate of one step.

    Warm-up is linear: step 0 gets 1 / `warmup_steps` of the peak and the last step of warm-up all of it. The decay
    begins there (cosine) or `decay_steps` before the end (wsd), and the last step of all gets `min_ratio` of
    the peak. constant stays at the peak.

    Args:
        optimizer: the schedule.
        train: `steps` and `global_batch`.
        step: steps done before this one; 0 for the first. Past the end the last value holds.
    """
    assert step >= 0, step
    peak, last = peak_lr(optimizer, train), train.steps - 1
    step = min(step, last)
    if step < optimizer.warmup_steps:
        return peak * ((step + 1) / optimizer.warmup_steps)
    if optimizer.schedule == "constant":
        return peak
    start = max(optimizer.warmup_steps - 1, 0)
    if optimizer.schedule == "wsd":
        start = max(start, last - optimizer.final_decay(train.steps))
    done = max(step - start, 0) / max(last - start, 1)
    if optimizer.schedule == "cosine":
        done = 0.5 * (1.0 - math.cos(math.pi * done))
    return peak * ((1.0 - done) + done * optimizer.min_ratio)
