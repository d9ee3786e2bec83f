"""Which rank a process is, for every launcher and every nesting of them."""

from dataclasses import replace

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.life.identity import (
    Identity,
    Master,
    detect,
    job_of,
    slurm_job,
    threads_per_rank,
    without_identity,
)

ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2", "SLURM_NTASKS": "4"}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2(x2)"}
STEP = {
    **ALLOCATION,
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
DAEMON = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "a/b",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {name: value for name, value in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-a-12@1",
    "PMIX_RANK": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_JOB_ID": "4242",
}

ENROOT = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "15077"}
"""What enroot's PyTorch hook makes of `STEP`; it leaves LOCAL_WORLD_SIZE out."""

OF_TORCHRUN = Identity(5, 8, 1, 4, "torchrun", "torchrun-a+b-2", Master("node1", 29500, True))
OF_STEP = Identity(3, 4, 1, 2, "srun", "slurm-77-3-0")
OF_SUBMITIT = Identity(1, 2, 1, 2, "submitit", "local-4242")
OF_OPENMPI = Identity(2, 4, 0, 2, "mpirun", "mpirun-prterun-a-12+1", mpi="pmix")


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, None),
        (TORCHRUN, OF_TORCHRUN),
        (BY_HAND, Identity(5, 8, 1, 4, "env", "env", Master("node1", 29500, False))),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Identity(0, 1, 0, 1, "env", "env")),
        (STEP, OF_STEP),
        ({**STEP, "SLURM_RESTART_COUNT": "2"}, Identity(3, 4, 1, 2, "srun", "slurm-77-3-2")),
        ({**STEP, "PMIX_RANK": "3", "HPCTRAIN_MPI": "pmix"}, Identity(3, 4, 1, 2, "srun", "slurm-77-3-0", mpi="pmix")),
        ({**STEP, "PMIX_RANK": "3"}, OF_STEP),
        (OPENMPI, OF_OPENMPI),
        (HYDRA, Identity(3, 4, 1, 2, "mpirun", "mpirun", mpi="pmi")),
        (SUBMITIT, OF_SUBMITIT),
    ],
    ids=[
        "nobody",
        "torchrun",
        "by-hand",
        "one-by-hand",
        "srun",
        "requeued",
        "pmix",
        "pmix-unasked",
        "openmpi",
        "hydra",
        "submitit",
    ],
)
def test_each_launcher(env, expected):
    assert detect(env) == expected


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_NTASKS": "4"},
        ALLOCATION,
        BATCH,
        {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFB)},
        {**ALLOCATION, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {**ALLOCATION, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "1"},
    ],
    ids=["ntasks", "salloc", "batch", "batch-step", "interactive-step", "pty-shell"],
)
def test_a_job_without_a_task_is_not_a_rank(env):
    assert detect(env) is None


@pytest.mark.parametrize(
    "env, expected",
    [
        ({**STEP, **TORCHRUN}, replace(OF_TORCHRUN, key="torchrun-77-0-a+b-2")),
        ({**STEP, **SUBMITIT}, OF_SUBMITIT),
        ({**ALLOCATION, **SUBMITIT}, OF_SUBMITIT),
        ({**BATCH, **SUBMITIT}, OF_SUBMITIT),
        ({**OPENMPI, **TORCHRUN}, OF_TORCHRUN),
        ({**DAEMON, **OPENMPI}, Identity(2, 4, 0, 2, "mpirun", "mpirun-77-0-prterun-a-12+1", mpi="pmix")),
        ({**DAEMON, **HYDRA}, Identity(3, 4, 1, 2, "mpirun", "mpirun-77-0", mpi="pmi")),
        (
            {**STEP, "PMI_RANK": "3", "PMI_SIZE": "4", "HPCTRAIN_MPI": "pmi2"},
            Identity(3, 4, 1, 2, "srun", "slurm-77-3-0", mpi="pmi"),
        ),
        ({**STEP, **ENROOT, "SLURM_RESTART_COUNT": "2"}, Identity(3, 4, 1, 2, "srun", "slurm-77-3-2")),
        ({**STEP, **ENROOT, "LOCAL_WORLD_SIZE": "2"}, OF_STEP),
        ({**DAEMON, **BY_HAND}, Identity(5, 8, 1, 4, "env", "env-77-0", Master("node1", 29500, False))),
        ({**STEP, "WORLD_SIZE": "4"}, OF_STEP),
    ],
    ids=[
        "torchrun-in-srun",
        "submitit-in-srun",
        "submitit-in-salloc",
        "submitit-in-batch",
        "torchrun-in-mpirun",
        "openmpi-by-srun",
        "hydra-by-srun",
        "srun-pmi2",
        "enroot-in-srun",
        "enroot-with-local-world",
        "by-hand-in-srun",
        "world-size-exported",
    ],
)
def test_the_innermost_launcher_decides(env, expected):
    assert detect(env) == expected


def test_uneven_nodes():
    env = {**STEP, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert [detect({**env, "SLURM_NODEID": n, "SLURM_LOCALID": "0"}).local_world for n in "0123"] == [2, 2, 2, 1]


def test_restart_is_another_life():
    lives = [STEP, {**STEP, "SLURM_RESTART_COUNT": "1"}, {**STEP, "SLURM_STEP_ID": "4"}, {**STEP, "SLURM_JOB_ID": "8"}]
    assert len({detect(env).key for env in lives}) == 4


@pytest.mark.parametrize(
    "marks", [{}, TORCHRUN, BY_HAND, OPENMPI, HYDRA], ids=["srun", "torchrun", "by-hand", "openmpi", "hydra"]
)
def test_lives_of_a_job_of_slurm_are_known_under_every_launcher(marks):
    first, second = (detect({**DAEMON, **marks, "SLURM_RESTART_COUNT": count}).key for count in "12")
    other = detect({**DAEMON, **marks, "SLURM_JOB_ID": "78"}).key
    assert first != second and job_of(first) == job_of(second) != job_of(other)


@pytest.mark.parametrize(
    "env, text",
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "MASTER_ADDR and MASTER_PORT are not"),
        ({**TORCHRUN, "RANK": "8"}, r"rank 8, which must lie in 0\.\.7"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, r"local rank 4, which must lie in 0\.\.3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "number of ranks on the node 9"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "LOCAL_RANK is not"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT is not"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not"),
        ({k: v for k, v in OPENMPI.items() if k != "OMPI_COMM_WORLD_SIZE"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not"),
        ({"SUBMITIT_LOCAL_GLOBALID": "0"}, "SUBMITIT_LOCAL_NTASKS is not"),
        ({**STEP, "SLURM_PROCID": "9"}, r"rank 9, which must lie in 0\.\.3"),
        ({**STEP, "SLURM_NODEID": "5"}, "says nothing of node 5"),
    ],
)
def test_contradictions_are_refused(env, text):
    with pytest.raises(LaunchError, match=text) as caught:
        detect(env)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("env", [TORCHRUN, OPENMPI, HYDRA, SUBMITIT, STEP, {**DAEMON, **OPENMPI, **TORCHRUN}])
def test_what_we_start_is_nobody(env):
    left = without_identity({**env, "PATH": "/bin", "NCCL_DEBUG": "INFO", "OMPI_MCA_btl": "tcp", "SLURM_CPU_BIND": "x"})
    assert detect(left) is None
    assert {"PATH", "NCCL_DEBUG", "OMPI_MCA_btl", "SLURM_CPU_BIND"} <= left.keys()
    assert left.get("SLURM_JOB_ID") == env.get("SLURM_JOB_ID")


def test_threads():
    assert [threads_per_rank(*x) for x in ((0, 16, 4), (0, 2, 4), (3, 16, 4), (0, 7, 2))] == [4, 1, 3, 3]


@pytest.mark.parametrize("port", ["0", "-1", "99999"])
def test_a_port_that_is_none(port):
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.raises(LaunchError, match=rf"MASTER_PORT={port} is no TCP port"):
        detect(env)


def test_an_element_of_an_array_is_not_called_by_the_name_of_the_array() -> None:
    element = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "4"}
    assert [slurm_job(env) for env in (element, STEP, {})] == ["77_4", "77", ""]
