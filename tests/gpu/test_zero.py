"""ZeRO stages 1 to 3 of the DeepSpeed engine on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu import zero
from tests.training import reference

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Losses of every case, or how it failed."""
    if reason := zero.absence():
        pytest.skip(reason)
    environment = {**os.environ, "DS_ACCELERATOR": "cuda"}
    command = [sys.executable, "-m", "tests.gpu.zero"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stage", zero.STAGES)
@pytest.mark.parametrize("precision,tolerance", [("float32", 1e-4), ("bf16", 3e-2), ("fp16", 1e-2)])
def test_zero_on_a_gpu_stays_beside_the_reference(outcomes, stage, precision, tolerance):
    found = outcomes[f"{stage} {precision}"]
    assert not isinstance(found, str), found
    assert found == pytest.approx(reference(zero.case(stage, precision)).losses, rel=tolerance)
