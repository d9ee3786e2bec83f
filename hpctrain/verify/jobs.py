"""Layouts that are verified where they are to run: each as a job of Slurm, on as many ranks as it has."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.config.schema import RunConfig
from hpctrain.errors import LaunchError
from hpctrain.launch.slurm.client import SlurmError
from hpctrain.launch.slurm.jobs import Job, cancel, wait
from hpctrain.launch.slurm.profile import Site
from hpctrain.launch.submit.postmortem import reasons
from hpctrain.launch.submit.sbatch import Options
from hpctrain.launch.submit.send import Request, submit
from hpctrain.verify.cases import Case

if TYPE_CHECKING:
    from hpctrain.verify.trace import Share

POLL_S = 1.0


def spread(cases: Sequence[Case], per_node: int, folder: Path) -> tuple[Case, ...]:
    """The cases on nodes of at most `per_node` ranks, each with a run folder of its own in a new one in `folder`."""
    home = (folder / f"verify-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}").absolute()
    out = []
    for index, case in enumerate(cases):
        size = max(n for n in range(1, per_node + 1) if case.world % n == 0)
        cluster = case.config.cluster.model_copy(update={"nodes": case.world // size, "gpus_per_node": size})
        config = case.config.model_copy(update={"cluster": cluster, "folder": home, "name": f"layout-{index}"})
        out.append(replace(case, config=config))
    return tuple(out)


class Jobs:
    """All cases in the queue at once, as a context; called for a case it waits for that one.

    However the context ends, no job is left that waits or runs, also where only some could be submitted.

    Args:
        cases: spread over nodes.
        steps: of each.
        site: profile of the cluster.
        options: of sbatch.
        warn: takes one line of text.
    """

    def __init__(
        self, cases: Sequence[Case], steps: int, site: Site, options: Options, warn: Callable[[str], None]
    ) -> None:
        self._configs = [case.config for case in cases if not case.refused]
        self._steps, self._site, self._options, self._warn = steps, site, options, warn
        self._jobs: dict[str, Job] = {}
        self._left: list[str] = []

    def __enter__(self) -> Jobs:
        """Submit them.

        Raises:
            LaunchError: Slurm refuses one.
        """
        try:
            for config in self._configs:
                self._submit(config)
        except BaseException:
            self._cancel()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    def _submit(self, config: RunConfig) -> None:
        from hpctrain.verify.rank import run_in_job

        settings = (config.model_dump(mode="json"), self._steps, str(config.run_folder))
        request = Request((config,), ((run_in_job, settings),), config.run_folder, self._site, self._options)
        (job,) = submit(request, self._warn)
        self._jobs[config.name] = job
        self._left += job.ids

    def _cancel(self) -> None:
        """End what has not ended."""
        if not self._left:
            return
        try:
            cancel(self._left)
        except SlurmError as error:
            self._warn(f"jobs {' '.join(self._left)} may be left in the queue: {error}")

    def __call__(self, config: RunConfig, world: int, steps: int) -> Sequence[Share]:
        from hpctrain.verify.rank import read_shares

        job = self._jobs[config.name]
        (state,) = wait(job.ids, POLL_S)
        self._left = [left for left in self._left if left not in job.ids]
        if not state.good:
            said = reasons(job.logs, state.id)
            raise LaunchError(f"{state}: {said[0] if said else f'its logs are in {job.logs}'}")
        return read_shares(config.run_folder, world)
