"""What a job inherits."""

from __future__ import annotations

import pytest

from hpctrain.errors import ConfigError
from hpctrain.launch.submit.environment import one_cluster, overruled, submission_environment

JOB_SCOPED = (
    *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_GPUS", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_CPU_BIND"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_TRES_PER_TASK", "SLURM_NTASKS"),
    *(
        "SLURM_NTASKS_PER_NODE",
        "SLURM_HOSTFILE",
        "SRUN_DEBUG",
        "PMI_RANK",
        "PMIX_RANK",
        "PMI2_X",
        "OMPI_COMM_WORLD_RANK",
    ),
)
OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SUBMITIT_EXECUTOR", "SLURM_PROCID", "SLURM_LOCALID")
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "PATH", "PYTHONPATH", "HOME")
OF_THE_USER = ("SLURM_HINT", "SLURM_MPI_TYPE", "CUDA_VISIBLE_DEVICES")


def passed(*names: str) -> set[str]:
    return set(submission_environment(dict.fromkeys(names, "1")))


@pytest.mark.parametrize("name", [*JOB_SCOPED, *OF_A_RANK])
def test_what_speaks_of_one_job_goes(name: str) -> None:
    assert passed(name, "PATH") == {"PATH"}


def test_how_to_reach_the_cluster_and_its_defaults_stay() -> None:
    assert passed(*KEPT) == set(KEPT)
    assert passed(*KEPT, "SLURM_JOB_ID") == set(KEPT)


def test_settings_of_the_user_stay_outside_a_job_only() -> None:
    assert passed(*OF_THE_USER) == set(OF_THE_USER)
    assert passed(*OF_THE_USER, "SLURM_JOB_ID") == set()


def test_names_that_only_begin_alike_stay() -> None:
    assert passed("RANKING", "PMI", "SRUN", "SLURMISH") == {"RANKING", "SRUN", "SLURMISH"}


SCRIPT = """#!/bin/bash
#SBATCH --job-name=tiny
#SBATCH --gres=gpu:2
#SBATCH --mem=0
#SBATCH --partition=batch
#SBATCH --time='1-0'
#SBATCH --exclusive
#SBATCH --signal=USR2@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/x/slurm-%j.out
#SBATCH --reservation=maint
echo '#SBATCH --account=none'
"""


@pytest.mark.parametrize(
    "name",
    [
        *("PARTITION", "TIMELIMIT", "JOB_NAME", "EXCLUSIVE", "RESERVATION", "OUTPUT", "ERROR"),
        *("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK", "MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
        *("NO_REQUEUE", "REQUEUE", "SIGNAL", "OPEN_MODE", "WAIT"),
    ],
)
def test_what_a_script_asks_for_is_not_changed_by_defaults_of_the_user(name: str) -> None:
    """To sbatch a variable counts more than a line of the script, and then --dry-run has shown another job."""
    assert submission_environment({f"SBATCH_{name}": "1", "PATH": "1"}, SCRIPT) == {"PATH": "1"}


def test_defaults_for_what_a_script_leaves_open_stay() -> None:
    others = {f"SBATCH_{name}": "1" for name in ("ACCOUNT", "QOS", "CONSTRAINT", "EXPORT", "CPUS_PER_GPU", "ARRAY_INX")}
    assert submission_environment(others, SCRIPT) == others
    assert overruled("#!/bin/bash\n") == {"SBATCH_WAIT"}, "with it sbatch stays until the job has ended"


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_CLUSTERS": "a"}, {"SLURM_CLUSTERS": "a", "SBATCH_CLUSTERS": "a"}], ids=lambda env: "-".join(env)
)
def test_one_cluster_that_all_commands_know_is_fine(env: dict[str, str]) -> None:
    one_cluster(env)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SBATCH_CLUSTERS": "b"}, "SBATCH_CLUSTERS='b': is read by sbatch alone"),
        ({"SLURM_CLUSTERS": "a", "SBATCH_CLUSTERS": "b"}, "set SLURM_CLUSTERS to it"),
        ({"SLURM_CLUSTERS": "a,b"}, "SLURM_CLUSTERS='a,b': is more than one cluster"),
        ({"SLURM_CLUSTERS": "all"}, "name one of them"),
    ],
)
def test_a_job_is_not_queued_where_it_would_not_be_found(env: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        one_cluster(env)
