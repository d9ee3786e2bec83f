"""What the command line and the planner use must not pay for torch."""

from __future__ import annotations

import subprocess
import sys

LIGHT = ("flops", "metrics", "meter", "sinks", "console", "memory", "environment", "report")


def test_no_torch_until_needed() -> None:
    names = [f"hpctrain.telemetry.{name}" for name in LIGHT] + ["hpctrain.train.schedule"]
    heavy = ("torch", "matplotlib", "tensorboard")
    code = f"import sys, {', '.join(names)}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
