"""What a job inherits from whoever submits it. Pure.

sbatch hands the environment of the submitter to the job, where srun reads SLURM_* again. Inside another job these
speak of that job: its nodes, its memory, its CPU masks. So they go; how to reach the cluster stays, and so do
defaults of the site for what a submission leaves open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.errors import ConfigError
from hpctrain.launch.life.identity import without_identity

KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})

_OF_A_JOB = re.compile(r"SLURM_(JOB|STEP|CPU|MEM|TRES|NTASKS)\w*|SLURM_HOSTFILE|SRUN_\w+|PMI\w*|OMPI_\w+")
_SET_IN_A_JOB = re.compile(r"SLURM\w*|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK|GPU_DEVICE_ORDINAL")


_GPUS = ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "GPU_BIND", "TRES_PER_TASK")
_MEMORY = ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")
_SAID_ELSEWHERE = {
    "array": ("ARRAY_INX",),
    "cpus-per-task": ("CPUS_PER_GPU", "TRES_PER_TASK"),
    "gpus-per-node": _GPUS,
    "gres": _GPUS,
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "output": ("OUTPUT", "ERROR"),
    "requeue": ("REQUEUE", "NO_REQUEUE"),
    "segment": ("SEGMENT_SIZE",),
    "switches": ("REQ_SWITCH", "WAIT4SWITCH"),
    "time": ("TIMELIMIT",),
}
"""Flags of sbatch and the ends of the variables that say the same, or what does not go with it; others have their own
name. Source: the man page of sbatch, input environment variables."""


def overruled(script: str) -> set[str]:
    """Variables of sbatch that would change what a batch script asks for: to sbatch they count more than the script."""
    flags = re.findall(r"^#SBATCH --([a-z0-9-]+)", script, re.MULTILINE)
    names = [name for flag in flags for name in _SAID_ELSEWHERE.get(flag, (flag.upper().replace("-", "_"),))]
    return {f"SBATCH_{name}" for name in (*names, "WAIT")}  # with the last, sbatch would stay until the job has ended


def one_cluster(env: Mapping[str, str]) -> None:
    """Refuse to queue a job where Slurm's other commands would not look for it, or not there alone.

    A job that is not found counts as forgotten, so a second one would be let into its run folder; and an id names
    another job on another cluster.

    Raises:
        ConfigError: names the variable.
    """
    only = env.get("SLURM_CLUSTERS", "")
    if "," in only or only == "all":
        why = "is more than one cluster, and job ids are of one"
        raise ConfigError("SLURM_CLUSTERS", only, why, "name one of them")
    other = env.get("SBATCH_CLUSTERS", only)
    if other != only:
        why = "is read by sbatch alone, so the job would not be found again"
        raise ConfigError("SBATCH_CLUSTERS", other, why, "set SLURM_CLUSTERS to it, which all of Slurm's commands read")


def submission_environment(env: Mapping[str, str], script: str = "") -> dict[str, str]:
    """The environment that sbatch is called with.

    Outside a job, settings of Slurm's commands that somebody exported (SLURM_HINT, SLURM_MPI_TYPE) are theirs and
    stay; inside one, nobody can tell them from those that the job has, so all but `KEPT` and SBATCH_* go, and so
    do the GPUs that the job was given.

    Args:
        env: of the submitter.
        script: that is submitted; SBATCH_* that speak of what it asks for go too.
    """
    inside = "SLURM_JOB_ID" in env or "SLURM_JOBID" in env
    taken = overruled(script)

    def kept(name: str) -> bool:
        if name in KEPT:
            return True
        return name not in taken and not (_OF_A_JOB.fullmatch(name) or (inside and _SET_IN_A_JOB.fullmatch(name)))

    return {name: value for name, value in without_identity(env).items() if kept(name)}
