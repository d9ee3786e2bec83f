"""A measurement as jobs of Slurm: the same launcher, script and binding as a training's. One job a number of nodes.

Jobs wait for each other, so that none disturbs the next. (An array of Slurm has one size for all its elements.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpctrain.comms.local import read
from hpctrain.comms.rank import rank_main
from hpctrain.comms.result import RESULT_FILE, Result
from hpctrain.comms.spec import Spec
from hpctrain.config.schema import ClusterConfig, RunConfig
from hpctrain.errors import ConfigError, LaunchError
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.client import SlurmError
from hpctrain.launch.slurm.jobs import Job, cancel, wait
from hpctrain.launch.slurm.profile import Site, site
from hpctrain.launch.submit.postmortem import reasons
from hpctrain.launch.submit.sbatch import Options
from hpctrain.launch.submit.send import Request, submit

PATIENCE_S = 60.0
"""For so long an NFS client may go on believing that a file is not there (`acdirmax`)."""

Warn = Callable[[str], None]


def requests(spec: Spec, nodes: Sequence[int], ranks: int, home: Path, options: Options, at: Site) -> list[Request]:
    """A submission for each number of nodes.

    Args:
        ranks: of a node.
        home: absolute; each job has a folder in it.

    Raises:
        ConfigError: MPI under a profile that does not start it.
    """
    if spec.backend == "mpi" and at.profile.mpi in (None, "none"):
        raise ConfigError(
            "--backend", "mpi", f"needs a profile that starts MPI, and {at.name} says mpi: {at.profile.mpi}",
            "set mpi in the profile to one of srun --mpi=list that your MPI library knows, such as pmix",
        )  # fmt: skip
    made = []
    for number in nodes:
        cluster = ClusterConfig(
            nodes=number, gpus_per_node=ranks, timeout_s=spec.timeout_s, threads=spec.threads, profile=at.name,
            device="cuda" if spec.backend == "nccl" else "cpu",
        )  # fmt: skip
        config = RunConfig(name=f"{number}-node{'s' * (number > 1)}", folder=home, cluster=cluster)
        entry = (rank_main, (spec.plain(), str(config.run_folder)))
        made.append(Request((config,), (entry,), config.run_folder, at, options))
    return made


def queue(made: Sequence[Request], warn: Warn) -> list[Job]:
    """Submit them, each to begin when the one before it has ended; all of them or none."""
    jobs: list[Job] = []
    try:
        for request in made:
            after = jobs[-1].ids[-1] if jobs else None
            (job,) = submit(replace(request, options=replace(request.options, after=after)), warn)
            jobs.append(job)
    except BaseException:
        _cancel(jobs)
        raise
    return jobs


def _cancel(jobs: Sequence[Job]) -> None:
    ids = [job_id for job in jobs for job_id in job.ids]
    with suppress(SlurmError):
        if ids:
            cancel(ids)


def run_jobs(
    spec: Spec, nodes: Sequence[int], ranks: int, home: Path, options: Options, profile: str, warn: Warn,
    detach: bool = False,
) -> list[tuple[Path, Result]]:  # fmt: skip
    """Submit, wait, and read what each job left. However it ends, no job is left in the queue.

    Args:
        detach: return when they are queued, with no results.

    Raises:
        ConfigError: there is no Slurm here.
        LaunchError: a job failed, in its own words.
    """
    if not client.has_slurm():
        raise ConfigError("--submit", True, "there is no Slurm here: no sbatch on PATH", "leave it out")
    made = requests(spec, nodes, ranks, home, options, site(profile))
    jobs = queue(made, warn)
    folders = [request.home for request in made]
    for job, folder in zip(jobs, folders):
        warn(f"job {', '.join(job.ids)}: {folder}")
    if detach:
        return []
    found: list[tuple[Path, Result]] = []
    try:
        for job, folder in zip(jobs, folders):
            (state,) = wait(job.ids)
            if not state.good:
                said = reasons(job.logs, state.id)
                raise LaunchError(f"{state}: {said[0] if said else f'its logs are in {job.logs}'}")
            found.append((folder, _patiently(folder)))
    finally:
        _cancel(jobs[len(found) :])
    return found


def _patiently(folder: Path) -> Result:
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / RESULT_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    return read(folder)
