"""A lab of somebody who is not root: user namespaces in the place of root, the rest as ever."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from hpctrain.lab import requirements

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

NOBODY = 65534
SCRIPT = "#!/bin/sh\nsrun --ntasks-per-node=2 sh -c 'echo $(hostname) $SLURM_LOCALID $CUDA_VISIBLE_DEVICES $(id -u)'\n"
USER_NAMESPACES = [
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "unshare",
    *requirements.ROOTLESS,
    "true",
]


def used(folder: str) -> dict[str, object]:
    """What a user without root sees of a lab from its beginning to its end."""
    import pwd

    from hpctrain import lab
    from hpctrain.lab import LabSpec

    assert pwd.getpwuid(NOBODY)
    home, seen = Path(folder) / "lab", dict[str, object]()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            raised = lab.up(LabSpec(home, nodes=2, gpus=2, cpus=4, rails=2))
            cluster = raised.cluster
            seen |= {"lacks": raised.lacks, "states": cluster.node_states()}
            (home.parent / "job").write_text(SCRIPT)
            out = home.parent / "out"
            flags = ["--parsable", "-N2", "--ntasks-per-node=2", "--gres=gpu:2", f"--output={out}"]
            job = cluster.run(["sbatch", *flags, str(home.parent / "job")], cwd=home.parent).stdout.strip()
            deadline = time.monotonic() + 60
            while cluster.run(["squeue", "-h", "-j", job, "-t", "PD,R,CG"]).stdout and time.monotonic() < deadline:
                time.sleep(0.1)
            seen["said"] = sorted(out.read_text().splitlines())
            lab.kill_node(cluster.spec, "n1")
            lab.start_node(cluster.spec, "n1")
            seen["again"] = cluster.run(["srun", "-N2", "hostname"]).stdout.split()
            seen["down"] = lab.down(home)
        except BaseException as error:
            seen["error"] = repr(error)
            lab.down(home)
        os.write(writing, json.dumps(seen).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    found: dict[str, object] = json.loads(os.read(reading, 1 << 16))
    return found


def test_a_lab_without_root(ranks) -> None:
    """Plain, with a sentence about rails that were asked for; jobs, GPUs, a node that dies and comes back, the end."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        os.chown(folder, NOBODY, NOBODY)
        seen = ranks(0, used, folder)[0]
        if subprocess.run(USER_NAMESPACES, capture_output=True).returncode:  # which this machine gives to root alone
            assert "a lab needs root, or a system that gives user namespaces to everybody" in str(seen["error"])
            return
        assert "error" not in seen, seen
        assert seen["lacks"] == "rails need root, for networks and their rates; run the command with sudo."
        assert seen["states"] == {"n0": "idle", "n1": "idle"}
        assert seen["said"] == [f"n{node} {local} 0,1 {NOBODY}" for node in range(2) for local in range(2)]
        assert sorted(seen["again"]) == ["n0", "n1"] and seen["down"] is True
        assert {path.name for path in Path(folder).iterdir()} == {"job", "out"}
