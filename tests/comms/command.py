"""Commands of `hpctrain bench` as programs and in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.comms.local import mpirun
from hpctrain.errors import LaunchError

ROOT = Path(__file__).parents[2]


def bench(*arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hpctrain", "bench", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)


def has_mpi() -> bool:
    try:
        mpirun()
    except LaunchError:
        return False
    return True


ABSENT = ["--sizes", "1K", "--timeout", "3", "--inject", json.dumps({"kind": "absent", "rank": 1})]


def names_the_absent(said: str) -> bool:
    found = ("barrier", "has not ended in", "rank 1 (process", "lives but does not take part")
    return all(part in said for part in found) and "Traceback" not in said


def invoke(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0 and not done.stdout and "Traceback" not in done.stderr
    return done.stderr
