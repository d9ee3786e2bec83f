"""Nodes that a run has found broken: kept in its folder, so that no later life of it takes one for good.

A node that is said to be exchanged and is not is worse than a node that is known to be bad: its logs say "swapped"
(saforem2/ezpz 235, MFlowCode/MFC 1835). So they are excluded when the run is submitted, and every allocation is held
against the list all the same. Run by the batch script when an allocation holds too many of them:

    python -m hpctrain.launch.place.badnodes RUN JOB SPARES
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster.hostlist import expand, fold
from hpctrain.errors import HpctrainError, LaunchError
from hpctrain.files import in_turn, write_whole
from hpctrain.launch.slurm import exclude
from hpctrain.launch.slurm.client import SlurmError

FILE = "bad_nodes.json"
"""In the run folder: name of a node -> why."""


REFUSED = 9
"""Exit status of a step of the batch script that the job must not go on after."""


class BadNodes(LaunchError):
    """An allocation that holds nodes which are known to be broken."""


def known(folder: Path) -> dict[str, str]:
    """Nodes that are broken, and why."""
    with suppress(OSError, ValueError, AttributeError):
        tree = json.loads((folder / FILE).read_text())
        return {str(name): str(why) for name, why in tree.items()}
    return {}


def remember(folder: Path, found: Mapping[str, str]) -> None:
    """Add nodes to the list; elements of a sweep do so at the same time."""
    with in_turn(folder / FILE):
        write_whole(folder / FILE, json.dumps({**known(folder), **found}, indent=2) + "\n")


def held(bad: Iterable[str], hosts: Sequence[str]) -> list[str]:
    """Those of an allocation that are broken."""
    names = set(bad)
    return [host for host in hosts if host in names]


def check(folder: Path, hosts: Sequence[str], spares: int = 0) -> None:
    """Refuse an allocation with more broken nodes than it has spares.

    Raises:
        BadNodes: names them.
    """
    bad = known(folder)
    mine = held(bad, hosts)
    if len(mine) > spares:
        raise BadNodes(
            f"this job was given {', '.join(mine)}, which {'is' if len(mine) == 1 else 'are'} known to be broken "
            f"({bad[mine[0]]}): it goes back into the queue without; take a node out of {folder / FILE} when it is "
            "mended."
        )


def leave(folder: Path, job: str, hosts: Sequence[str], spares: int = 0) -> bool:
    """Put the job back into the queue, with all known broken nodes excluded, if its allocation holds too many of them.

    Returns:
        Whether it did; this script has to end then.

    Raises:
        BadNodes: Slurm has given the job nodes that it was told to exclude.
        SlurmError: it refuses.
    """
    bad = known(folder)
    mine = held(bad, hosts)
    if len(mine) <= spares:
        return False
    already = exclude.excluded_of(job)
    if set(mine) <= set(already):
        raise BadNodes(
            f"Slurm has given this job {', '.join(mine)}, which {'is' if len(mine) == 1 else 'are'} among the nodes "
            f"that it excludes: take them out of {folder / FILE} if they are mended, else submit to other nodes."
        )
    exclude.requeue_without(job, bad)
    return True


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The step of the batch script: 0 if the job is back in the queue."""
    folder, job, spares = Path(argv[0]), argv[1], int(argv[2])
    try:
        if leave(folder, job, expand(env["SLURM_JOB_NODELIST"]), spares):
            print(f"the job is back in the queue, without {fold(known(folder), sort=True)}", file=sys.stderr)
            return 0
    except SlurmError as error:
        bad = fold(known(folder), sort=True)
        print(f"error: {error} Submit the run again: nodes known to be broken, {bad}, are left out.", file=sys.stderr)
    except HpctrainError as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
