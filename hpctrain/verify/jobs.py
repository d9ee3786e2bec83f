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
from hpctrain.launch.jobs import Job, wait
from hpctrain.launch.postmortem import reasons
from hpctrain.launch.profile import Site
from hpctrain.launch.sbatch import Options
from hpctrain.launch.slurm import Request, submit
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
    """All cases in the queue at once; called for a case it waits for that one.

    Args:
        cases: spread over nodes.
        steps: of each.
        site: profile of the cluster.
        options: of sbatch.
        warn: takes one line of text.

    Raises:
        LaunchError: Slurm refuses one of them.
    """

    def __init__(
        self, cases: Sequence[Case], steps: int, site: Site, options: Options, warn: Callable[[str], None]
    ) -> None:
        from hpctrain.verify.rank import run_in_job

        self._jobs: dict[str, Job] = {}
        for case in cases:
            if not case.refused:
                config = case.config
                settings = (config.model_dump(mode="json"), steps, str(config.run_folder))
                request = Request((config,), ((run_in_job, settings),), config.run_folder, site, options)
                (self._jobs[config.name],) = submit(request, warn)

    def __call__(self, config: RunConfig, world: int, steps: int) -> Sequence[Share]:
        from hpctrain.verify.rank import read_shares

        job = self._jobs[config.name]
        (state,) = wait(job.ids, POLL_S)
        if not state.good:
            said = reasons(job.logs, state.id)
            raise LaunchError(f"{state}: {said[0] if said else f'its logs are in {job.logs}'}")
        return read_shares(config.run_folder, world)
