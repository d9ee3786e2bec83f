"""A running lab, as its users see it: an environment for Slurm's commands, and the commands with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import LabError
from hpctrain.lab import requirements
from hpctrain.lab.spec import LabSpec

FOREIGN = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_")
"""Beginnings of variables that speak of another cluster, or of a job around this process."""

PROGRAMS = (
    *("sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo", "sprio"),
    *("squeue", "sreport", "srun", "sshare", "sstat", "strigger"),
)
"""Slurm's commands for users."""

CANCEL_S = 5.0
"""What a command gets to withdraw its job once its time is up."""


@dataclass(frozen=True)
class Cluster:
    """A lab that runs.

    Args:
        spec: what it is.
    """

    spec: LabSpec

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """`base` with this lab as the cluster, and with this Python and Slurm's commands on PATH.

        In front of it, for a lab with rails: commands that enter its network first.
        """
        kept = {name: value for name, value in base.items() if not name.startswith(FOREIGN)}
        first = [str(self.spec.programs)] if self.spec.rails else []
        path = [*first, str(Path(sys.executable).parent), *base.get("PATH", "").split(os.pathsep)]
        path += [folder for folder in requirements.PATH.split(os.pathsep) if folder not in path]
        return kept | {"SLURM_CONF": str(self.spec.slurm_conf), "PATH": os.pathsep.join(filter(None, path))}

    def run(
        self, command: Sequence[str], timeout_s: float = 30.0, check: bool = True, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as a user of the cluster.

        Raises:
            LabError: it takes longer than `timeout_s`, or fails and `check` is set; with what it said.
        """
        child = subprocess.Popen(
            list(command),
            env=self.environment(),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with child:
            try:
                output, errors = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                _withdraw(child)
                raise LabError(
                    f"{command[0]} has not ended after {timeout_s:g} s; see the logs in {self.spec.folder}/log."
                ) from None
            except BaseException:
                _withdraw(child)
                raise
        if check and child.returncode:
            said = (errors.strip() or output.strip() or "nothing").splitlines()[-1]
            raise LabError(f"{command[0]} failed with status {child.returncode}: it said {said!r}.")
        return subprocess.CompletedProcess(list(command), child.returncode, output, errors)

    def node_states(self) -> dict[str, str]:
        """Slurm's word for each node: `idle`, `mixed`, `allocated`, `down`, ...; with a `*` if it does not answer."""
        lines = self.run(["sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %T"]).stdout
        words = lines.split()
        return dict(zip(words[::2], words[1::2]))


def _withdraw(child: subprocess.Popen[str]) -> None:
    """End a command so that it can give back what it holds: an salloc killed outright leaves its nodes taken."""
    child.terminate()
    try:
        child.wait(CANCEL_S)
    except subprocess.TimeoutExpired:
        child.kill()
