"""Who this process is: its rank, the size of the world, and how the ranks of one life of a job know each other.

Pure: an environment goes in, a value comes out. Launchers nest (torchrun inside an srun step inside an
allocation), and a process inherits the variables of all of them; the innermost one decides:

1. torchrun, or `RANK` set by hand: nothing of ours runs between it and the rank. Where `RANK` says what the step of
   srun says (the PyTorch hook of enroot sets it from that), the step decides, which knows more.
2. mpirun. Its daemons are often started by srun, so a rank also sees the step of its daemon.
3. submitit's local executor, which may run inside an allocation or a step.
4. a step of srun. The batch script, a shell of salloc and a shell of `srun --pty` see a job too, but no rank
   was started there: they are not ranks.

`without_identity` removes all of these for processes that we start ourselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpctrain.errors import LaunchError

Source = Literal["alone", "torchrun", "env", "mpirun", "submitit", "srun"]
WireUp = Literal["", "pmix", "pmi"]

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers its own steps (interactive, batch, extern) from the end of 32 bits."""

MPI_VARIABLE = "HPCTRAIN_MPI"
"""Set by the batch script where the profile names an MPI protocol. A site may have one for every step (`MpiDefault`),
and then it is nobody's wish that the ranks start it."""

TABLE_VARIABLE = "HPCTRAIN_RANK_TABLE"
"""Set by the batch script: the rank table of this life of the job. It may not be there: then nothing is planned."""

_MARKS = re.compile(
    MPI_VARIABLE
    + f"|{TABLE_VARIABLE}"
    + r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+"
    r"|TORCHELASTIC_\w+|SUBMITIT_\w+|SLURM_(PROCID|LOCALID|GTIDS|STEP\w*)|OMPI_COMM_WORLD_\w+|PMI_\w+"
    r"|PMIX_(?!MCA_)\w+|MPI_LOCAL\w+"
)


class Master(NamedTuple):
    """The store that a launcher has named.

    Attributes:
        host: name or address.
        port: TCP port.
        hosted: the launcher serves it; otherwise rank 0 does.
    """

    host: str
    port: int
    hosted: bool = False


@dataclass(frozen=True)
class Identity:
    """One rank as its launcher names it.

    Attributes:
        rank: 0 .. world - 1.
        world: ranks of the job.
        local_rank: position among the ranks of this node.
        local_world: ranks on this node.
        source: what said so.
        key: names this life of the job: alike on all its ranks, another after a restart. Safe as a file name.
        master: the store to meet at, where the launcher names one.
        mpi: the protocol an MPI library is to start up with here, if any.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    source: Source
    key: str
    master: Master | None = None
    mpi: WireUp = ""

    def __post_init__(self) -> None:
        for what, index, count in (
            ("rank", self.rank, self.world),
            ("local rank", self.local_rank, self.local_world),
            ("number of ranks on the node", self.local_world, self.world + 1),
        ):
            if not 0 <= index < count:
                raise LaunchError(
                    f"{self.source} gives this process {what} {index}, which must lie in 0..{count - 1}: "
                    "variables of two launchers are mixed; unset those that were exported by hand."
                )

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world == self.world


ALONE = Identity(0, 1, 0, 1, "alone", "alone")
"""A world of one, started by nobody."""


def detect(env: Mapping[str, str]) -> Identity | None:
    """The rank that a launcher started this process as, or None where no launcher did.

    Raises:
        LaunchError: the variables of the launcher are incomplete or contradict each other.
    """
    for read in (_torchrun, _mpirun, _submitit, _srun):
        identity = read(env)
        if identity is not None:
            return identity
    if "WORLD_SIZE" in env:
        raise LaunchError(
            f"WORLD_SIZE={env['WORLD_SIZE']} is set but RANK is not, and no launcher was found: "
            "start one process a rank with torchrun, srun or mpirun, or unset WORLD_SIZE."
        )
    return None


def without_identity(env: Mapping[str, str]) -> dict[str, str]:
    """The environment less everything that makes a process a rank; the job's own variables stay."""
    return {name: value for name, value in env.items() if not _MARKS.fullmatch(name)}


def slurm_job(env: Mapping[str, str]) -> str:
    """How Slurm's commands know the job that has this environment; empty where there is none.

    Of an array, one element has the id of the array as its own, and by that name it would be all of them.
    """
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "")


def threads_per_rank(asked: int, cpus: int, ranks: int) -> int:
    """CPU threads of a rank.

    Args:
        asked: `cluster.threads`; 0 divides the CPUs.
        cpus: CPUs the rank may run on.
        ranks: ranks that share them.
    """
    return asked or max(1, cpus // ranks)


def _number(env: Mapping[str, str], name: str, needed_by: str) -> int:
    if name not in env:
        raise LaunchError(f"{needed_by} is set but {name} is not: set both, or neither.")
    try:
        return int(env[name])
    except ValueError:
        raise LaunchError(f"{name}={env[name]!r} must be a whole number.") from None


def _key(*parts: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]", "+", "-".join(parts))


def _job_and_restart(env: Mapping[str, str]) -> tuple[str, ...]:
    """A requeued batch script starts its launcher again, perhaps with the same names."""
    return (env["SLURM_JOB_ID"], env.get("SLURM_RESTART_COUNT", "0")) if "SLURM_JOB_ID" in env else ()


def job_of(key: str) -> str:
    """The part of a key that all lives of a job have: its launcher and, in Slurm, its id."""
    return "-".join(key.split("-")[:2])


def _torchrun(env: Mapping[str, str]) -> Identity | None:
    if "RANK" not in env:
        return None
    rank, world = _number(env, "RANK", "RANK"), _number(env, "WORLD_SIZE", "RANK")
    elastic = "TORCHELASTIC_RUN_ID" in env
    if not elastic and _in_step(env) and (rank, world) == _of_step(env):
        return None
    master = None
    if "MASTER_ADDR" in env or "MASTER_PORT" in env:
        port = _number(env, "MASTER_PORT", "MASTER_ADDR")
        if "MASTER_ADDR" not in env:
            raise LaunchError("MASTER_PORT is set but MASTER_ADDR is not: set both, or neither.")
        if not 0 < port < 65536:
            raise LaunchError(f"MASTER_PORT={port} is no TCP port: set one between 1 and 65535, free on MASTER_ADDR.")
        master = Master(env["MASTER_ADDR"], port, env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    elif world > 1:
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={world} are set but MASTER_ADDR and MASTER_PORT are not: "
            "set them to where rank 0 listens, or unset RANK."
        )
    if "LOCAL_RANK" in env:
        local_rank, local_world = _number(env, "LOCAL_RANK", "RANK"), _number(env, "LOCAL_WORLD_SIZE", "LOCAL_RANK")
    elif world == 1:
        local_rank, local_world = 0, 1
    else:
        raise LaunchError("RANK is set but LOCAL_RANK is not: set LOCAL_RANK and LOCAL_WORLD_SIZE too.")
    source: Source = "torchrun" if elastic else "env"
    run = (env["TORCHELASTIC_RUN_ID"], env.get("TORCHELASTIC_RESTART_COUNT", "0")) if elastic else ()
    key = _key(source, *_job_and_restart(env), *run)
    return Identity(rank, world, local_rank, local_world, source, key, master)


def _mpirun(env: Mapping[str, str]) -> Identity | None:
    job = _job_and_restart(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        name = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
        return Identity(
            _number(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK"),
            _number(env, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
            _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"),
            _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"),
            "mpirun",
            _key("mpirun", *job, name),
            mpi="pmix",
        )
    if "PMI_RANK" not in env:
        return None
    rank, world = _number(env, "PMI_RANK", "PMI_RANK"), _number(env, "PMI_SIZE", "PMI_RANK")
    if _in_step(env) and (rank, world) == _of_step(env):
        return None  # srun --mpi=pmi2: the step says the same and more
    local_rank = _number(env, "MPI_LOCALRANKID", "PMI_RANK") if world > 1 else 0
    local_world = _number(env, "MPI_LOCALNRANKS", "PMI_RANK") if world > 1 else 1
    return Identity(rank, world, local_rank, local_world, "mpirun", _key("mpirun", *job), mpi="pmi")


def _submitit(env: Mapping[str, str]) -> Identity | None:
    if "SUBMITIT_LOCAL_GLOBALID" not in env:
        return None
    rank = _number(env, "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_GLOBALID")
    world = _number(env, "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID")
    return Identity(rank, world, rank, world, "submitit", _key("local", env.get("SUBMITIT_LOCAL_JOB_ID", "")))


def _in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task."""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID") or ""
    if not {"SLURM_JOB_ID", "SLURM_PROCID"} <= env.keys() or not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP:
        return False
    shell = "SLURM_PTY_PORT" in env and _of_step(env)[1] == 1
    return not shell


def _of_step(env: Mapping[str, str]) -> tuple[int, int]:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    return _number(env, "SLURM_PROCID", "SLURM_PROCID"), _number(env, tasks, "SLURM_PROCID")


def _srun(env: Mapping[str, str]) -> Identity | None:
    if not _in_step(env):
        return None
    rank, world = _of_step(env)
    step = env.get("SLURM_STEP_ID") or env["SLURM_STEPID"]
    wire_up: WireUp = "pmix" if "PMIX_RANK" in env else "pmi" if "PMI_RANK" in env else ""
    return Identity(
        rank,
        world,
        _number(env, "SLURM_LOCALID", "SLURM_PROCID"),
        _tasks_here(env, world),
        "srun",
        _key("slurm", env["SLURM_JOB_ID"], step, env.get("SLURM_RESTART_COUNT", "0")),
        mpi=wire_up if env.get(MPI_VARIABLE) else "",
    )


def _tasks_here(env: Mapping[str, str], world: int) -> int:
    """Tasks of the step on this node, from `2(x3),1` and the node's index."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    if not counts and int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or 1) == 1:
        return world
    node = _number(env, "SLURM_NODEID", "SLURM_PROCID") if len(counts) > 1 else 0
    if node >= len(counts):
        raise LaunchError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} says nothing of node {node}, on which this rank runs: "
            "start the ranks with srun, whose variables agree."
        )
    return counts[node]
