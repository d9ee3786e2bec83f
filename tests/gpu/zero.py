"""Three steps of each ZeRO stage on one GPU, in a process of its own: the ranks of the tests come from one that
has imported DeepSpeed to compute on the CPU.

    DS_ACCELERATOR=cuda python -m tests.gpu.zero
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import traceback
from typing import Any

from hpctrain.config.schema import RunConfig
from hpctrain.sharding.deepspeed.patches import VERSION
from tests.training import make_config

STAGES, PRECISIONS = (1, 2, 3), ("float32", "bf16", "fp16")


def absence() -> str:
    """Why the engine cannot be tried on this machine; empty where it can."""
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "DeepSpeed is not installed here"
    return "" if found == VERSION else f"DeepSpeed {found} is installed here, and the engine is written for {VERSION}"


def case(stage: int, precision: str) -> RunConfig:
    """What is trained."""
    return make_config(train=dict(precision=precision, loss_scale=256.0), sharding=dict(stage=stage))


def main() -> None:
    """Print the losses of every case, by name, or the traceback it ended with."""
    from tests.gpu.test_one_gpu import losses

    out: dict[str, Any] = {}
    for stage in STAGES:
        for precision in PRECISIONS:
            try:
                out[f"{stage} {precision}"] = losses(case(stage, precision), 1)
            except Exception:
                out[f"{stage} {precision}"] = traceback.format_exc()
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
