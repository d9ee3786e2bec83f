"""Jobs on Slurm, through submitit: it pickles the entry point and names the files; the script is ours."""

from __future__ import annotations

import datetime
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from hpctrain.config.schema import RunConfig
from hpctrain.errors import LaunchError
from hpctrain.launch.place import badnodes
from hpctrain.launch.place.jobplan import PLAN, JobPlan, orders
from hpctrain.launch.rank.task import slurm_task
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.jobs import Job, cancel, refuse_second, whole
from hpctrain.launch.slurm.profile import Site
from hpctrain.launch.slurm.rules import Slurm
from hpctrain.launch.submit import leftovers, snapshot
from hpctrain.launch.submit.environment import one_cluster, submission_environment
from hpctrain.launch.submit.lint import lint
from hpctrain.launch.submit.sbatch import JobFolders, Options, sbatch_text

SCRIPT = "submission.sh"
"""In the folder of a submission; by this path Slurm knows what it has queued."""

Entry = tuple[Callable[..., Any], tuple[Any, ...]]
"""What each rank calls: a function that is importable by name, and plain arguments."""


@dataclass(frozen=True)
class Request:
    """One submission.

    Attributes:
        configs: of the run; of a sweep, one for each element of the job array.
        entries: what the ranks of each call.
        home: working directory of the job: the run folder, or the folder of the sweep.
        site: profile of the cluster.
        options: of sbatch.
        chain: jobs that follow each other, each when the one before it has ended.
    """

    configs: tuple[RunConfig, ...]
    entries: tuple[Entry, ...]
    home: Path
    site: Site
    options: Options
    chain: int = 1

    @property
    def array(self) -> bool:
        return bool(self.options.elements)


def folders(request: Request, stamp: str, copied: bool) -> JobFolders:
    """Where the files of a submission are.

    Args:
        request: of it.
        stamp: its name.
        copied: whether it has a copy of the code.
    """
    read: set[Path] = set()
    if request.site.profile.container:
        read |= {path.parent for c in request.configs for path in c.data.blend or (c.data.corpus,)}
        starts = ((c.checkpoint.continue_from, c.checkpoint.base) for c in request.configs)
        read |= {path for paths in starts for path in paths if path is not None}
        read |= {Path(request.site.profile.nccl_topo)} if request.site.profile.nccl_topo else set()
    code = request.home / "code" / stamp if copied else None
    return JobFolders(request.home, stamp, code, tuple(sorted(read)))


def script(request: Request, where: JobFolders, slurm: Slurm | None = None) -> str:
    """The text that sbatch is given; by the Slurm that is here, unless that was asked already."""
    config = request.configs[0].model_copy(update={"name": request.home.name})
    options = replace(request.options, exclude=_broken(request.home))
    return sbatch_text(config, request.site, options, where, sys.executable, slurm or client.installed())


def _broken(home: Path) -> tuple[str, ...]:
    """Nodes that earlier lives of the run have found broken, as far as Slurm still has them: it refuses others."""
    bad = badnodes.known(home)
    if bad:
        with suppress(client.SlurmError):
            there = client.call(["sinfo", "--noheader", "--Node", "--format=%N"])
            return tuple(sorted(bad.keys() & set(there.split())))
    return tuple(sorted(bad))


def submit(request: Request, warn: Callable[[str], None]) -> list[Job]:
    """Queue a submission. Either all of it is queued, or nothing is and nothing is left of it.

    Args:
        request: whose settings were checked.
        warn: takes one line of text.

    Returns:
        The job of each configuration, written into its run folder too.

    Raises:
        LaunchError: the run has a job already, or Slurm refuses, in its own words.
        ConfigError: the environment names another cluster to sbatch than to the rest of Slurm.
    """
    one_cluster(os.environ)
    refuse_second(*(config.run_folder for config in request.configs))
    with ExitStack() as undo:
        for folder in (request.home, *(config.run_folder for config in request.configs)):
            _make(folder, undo)
        top = snapshot.checkout()
        stamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
        where = folders(request, stamp, top is not None)
        _make(where.logs, undo)
        _make(where.jobs.parent, undo)
        undo.callback(shutil.rmtree, where.jobs.parent, ignore_errors=True)
        if top and where.code:
            _copy_code(top, where.code, undo, warn)
        if orders(request.site.profile):
            (where.jobs.parent / PLAN).write_text(JobPlan.of(request.configs, request.site).dump())
        slurm = client.installed()
        for said in lint(script(request, where, slurm)):
            warn(said)
        chain: list[list[str]] = []
        undo.callback(_withdraw, where, chain)
        for _ in range(request.chain):
            after = chain[-1][0].split("_")[0] if chain else None  # of an array, all elements
            link = replace(request, options=replace(request.options, after=after))
            chain.append(_Executor(where, script(link, where, slurm)).send(request.entries, request.array))
        jobs = [_job(request, [link[index] for link in chain], where) for index in range(len(request.configs))]
        for config, job in zip(request.configs, jobs):
            job.write(config.run_folder)
        if request.array:
            _job(request, [job_id for link in chain for job_id in link], where).write(request.home)
        undo.pop_all()
    with suppress(LaunchError, OSError):
        leftovers.clear(request.home, stamp)
    return jobs


def _job(request: Request, ids: Sequence[str], where: JobFolders) -> Job:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    given = {name: value for name, value in vars(request.options).items() if value}
    return Job(tuple(ids), now, where.logs, where.code, request.site.name, given)


def _make(folder: Path, undo: ExitStack) -> None:
    """Make a folder and its parents; those that were not there go again, when they are empty, if it comes to that."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"{folder} cannot be made ({error.strerror}): the run folder must be writable.") from None
    for path in reversed(missing):
        undo.callback(_remove_empty, path)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _copy_code(top: Path, target: Path, undo: ExitStack, warn: Callable[[str], None]) -> None:
    _make(target.parent, undo)
    undo.callback(shutil.rmtree, target, ignore_errors=True)
    loose = snapshot.take(top, target)
    if loose:
        warn(f"{len(loose)} files that git does not track are not in the job's code, for example {loose[0]}: git add.")


def _withdraw(where: JobFolders, chain: Sequence[Sequence[str]]) -> None:
    """Cancel the jobs of a submission: those that sbatch told of, and one that it has queued and not told of any more.

    Where Slurm does not answer, such a job ends by itself: it looks for the folder of its submission.
    """
    command = str(where.jobs.parent / SCRIPT)
    queued = []
    with suppress(LaunchError):
        rows = client.call(["squeue", "--me", "--noheader", "--format=%F|%o"]).splitlines()
        queued = [job for job, _, script in (row.partition("|") for row in rows) if script.strip() == command]
    ids = whole([*(job for link in chain for job in link), *queued])
    with suppress(LaunchError):
        if ids:
            cancel(ids)


class _Executor(SlurmExecutor):
    """submitit's executor with our script, and sbatch called in a clean environment and with a time limit.

    submitit puts pickles and scripts beside the job's folder, under temporary names, until it knows the job's id.
    """

    def __init__(self, where: JobFolders, text: str) -> None:
        super().__init__(where.jobs, python=sys.executable)
        self._text, self._waiting = text, where.jobs.parent

    def send(self, entries: Sequence[Entry], array: bool) -> list[str]:
        """Queue one job, an array where it is asked for; the id of each entry's."""
        tasks = [DelayedSubmission(slurm_task, function, args) for function, args in entries]
        if not array:
            return [job.job_id for job in self._internal_process_submissions(tasks)]
        pickles = [self._waiting / f"{index}.pkl" for index in range(len(tasks))]
        for task, pickle in zip(tasks, pickles):
            task.dump(pickle)
        first = self._submit_command("").job_id
        jobs: list[SlurmJob[Any]] = [SlurmJob(self.folder, f"{first}_{i}", [0]) for i in range(len(tasks))]
        for job, pickle in zip(jobs, pickles):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return [job.job_id for job in jobs]

    def _submit_command(self, command: str) -> SlurmJob[Any]:
        path = self._waiting / SCRIPT
        path.write_text(self._text)
        try:
            said = client.call(["sbatch", "--parsable", str(path)], submission_environment(os.environ, self._text))
        except client.SlurmError as error:
            if not error.said:
                raise
            raise LaunchError(
                f"Slurm refused the job: {client.reason(error.said)}; change what it asks for in the profile, "
                "or with --partition, --account, --qos, --time, cluster.nodes and cluster.gpus_per_node."
            ) from None
        job_id = said.strip().splitlines()[-1].split(";")[0]  # id;cluster where there are several
        job: SlurmJob[Any] = SlurmJob(self.folder, job_id, [0])
        job.paths.move_temporary_file(path, "submission_file")
        return job
