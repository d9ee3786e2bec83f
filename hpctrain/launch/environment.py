"""What a job inherits from whoever submits it. Pure.

sbatch hands the environment of the submitter to the job, where srun reads SLURM_* again. Inside another job these
speak of that job: its nodes, its memory, its CPU masks. So they go; how to reach the cluster, and the defaults of
the site, stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.launch.identity import without_identity

KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})

_OF_A_JOB = re.compile(r"SLURM_(JOB|STEP|CPU|MEM|TRES|NTASKS)\w*|SRUN_\w+|PMI\w*|OMPI_\w+")
_SET_IN_A_JOB = re.compile(r"SLURM\w*|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK|GPU_DEVICE_ORDINAL")


def submission_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment that sbatch is called with.

    Outside a job, settings of Slurm's commands that somebody exported (SLURM_HINT, SLURM_MPI_TYPE) are theirs and
    stay; inside one, nobody can tell them from those that the job has, so all but `KEPT` and SBATCH_* go, and so
    do the GPUs that the job was given.
    """
    inside = "SLURM_JOB_ID" in env or "SLURM_JOBID" in env

    def kept(name: str) -> bool:
        if name in KEPT:
            return True
        return not (_OF_A_JOB.fullmatch(name) or (inside and _SET_IN_A_JOB.fullmatch(name)))

    return {name: value for name, value in without_identity(env).items() if kept(name)}
