"""What it is worth that ranks talk along their rails: all-reduces of dp groups in a job, on a lab with rails.

A practice cluster of 4 nodes with 4 GPUs and 4 rails of 200 Mbit/s comes up for the time of the measurement. A job is
submitted to it as any run is: its batch script makes the rank table, and each rank takes its place by it, so hpctrain
chooses the rail that a rank listens on. All dp groups sum 8 MiB at the same time; beside that, the same ranks on wrong
rails. The mappings take turns in the same 16 processes, each with process groups of its own; reported are medians over
rounds of the ratio within a round. Bytes are those that the interfaces of nodes and spine have counted, and are held
against those that the rank table foresees for each node and rail.

    python -m benchmarks.rails [--rounds 5] [--mib 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rails_job import ALONG, BOUND, CROWD, LIMIT_S, MAPPINGS, ROTATED, body
from hpctrain.config.schema import RunConfig
from hpctrain.errors import LabError
from hpctrain.lab import Cluster, LabSpec, Traffic, cluster, counters, railbind
from hpctrain.lab.fabric import check
from hpctrain.launch.place.tablefile import JobTable, load
from hpctrain.launch.slurm.jobs import Job, cancel, states, wait
from hpctrain.launch.slurm.profile import site
from hpctrain.launch.submit.sbatch import Options
from hpctrain.launch.submit.send import Request, submit
from hpctrain.layout.traffic import wire

ROOT = Path(__file__).parent.parent
AT_LEAST = {CROWD: 3.0, ROTATED: 1.5}
"""How much faster hpctrain's placement is meant to be than these."""
WITHIN = 0.05
"""Share by which counted bytes may differ from those foreseen: headers, acknowledgements."""


@dataclass(frozen=True)
class Turn:
    """One all-reduce of every group under one mapping.

    Attributes:
        seconds: from the first rank's beginning to the last one's end.
        moved: bytes by machine and interface.
    """

    seconds: float
    moved: dict[str, dict[str, Traffic]]

    def sent(self, rail: str) -> list[int]:
        """Bytes that each node has sent by an interface."""
        return [found[rail].sent for found in self.moved.values() if rail in found]

    @property
    def crossed(self) -> int:
        """Bytes that went from one rail to another, over the spine."""
        return sum(traffic.sent for traffic in self.moved["spine"].values())


@dataclass
class Fleet:
    """The ranks of a job on all GPUs of a lab with rails.

    Attributes:
        table: the job's rank table.
        interfaces: that each rank was given by it.
    """

    lab: Cluster
    folder: Path
    job: Job
    table: JobTable
    interfaces: dict[int, str]
    turns: int = 0

    def turn(self, name: str) -> Turn:
        """An all-reduce under the mapping of a name.

        Raises:
            LabError: the job has ended.
        """
        before = counters(self.lab.spec)
        part = self.folder / f".ask-{self.turns}"
        part.write_text(name)
        part.rename(self.folder / f"ask-{self.turns}")
        answer = self.folder / f"answer-{self.turns}"
        await_file(answer, self.job)
        after = counters(self.lab.spec)
        self.turns += 1
        moved = {m: {i: t - before[m][i] for i, t in found.items()} for m, found in after.items()}
        return Turn(float(answer.read_text()), moved)

    def foreseen(self, size: int) -> dict[str, list[float]]:
        """Bytes that every node sends by each rail in an all-reduce of `size` bytes over dp, by the rank table."""
        table = self.table.table
        out = {name: [0.0] * len(table.hosts) for name in self.lab.spec.rail_names}
        for place in table:
            out[place.nic][place.node] += wire("all_reduce", size, table.layout.dp)
        return out


@contextmanager
def fleet(lab: Cluster, mib: float) -> Iterator[Fleet]:
    """A job with a rank on each GPU of a lab with rails.

    Raises:
        LabError: it ends before it is asked to, or takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-rails-") as made, user_of(lab):
        folder = Path(made)
        (job,) = submit(request(lab.spec, folder, int(mib * 2**20)), lambda text: None)
        try:
            await_file(folder / "ready", job)
            (path,) = (folder / "rails" / "jobs").glob("*/*/rank_table-0.json")
            table = load(path)
            assert table is not None
            seats = [json.loads((folder / f"seat-{rank}").read_text()) for rank in range(len(table.table))]
            yield Fleet(lab, folder, job, table, {seat["rank"]: seat["interface"] for seat in seats})
            (folder / "end").touch()
            if [state.state for state in wait(job.ids, 0.2)] != ["COMPLETED"]:
                raise LabError(f"the ranks on the lab did not end well: {last_words(job)}")
        finally:
            if not states(job.ids)[job.ids[0]].ended:
                cancel(job.ids)
                wait(job.ids, 0.2)


def request(spec: LabSpec, folder: Path, size: int) -> Request:
    """The job: tp inside the nodes, dp between them."""
    tree = {
        "name": "rails",
        "folder": str(folder),
        "cluster": {"nodes": spec.nodes, "gpus_per_node": spec.gpus, "profile": "lab"},
        "parallel": {"tp": spec.gpus},
        "model": {"heads": spec.gpus, "kv_heads": spec.gpus, "hidden": 16 * spec.gpus},
        "data": {"corpus": str(folder / "none.h5")},
    }
    config, here = RunConfig.model_validate(tree), site("lab")
    preload = {} if railbind.obstacle(spec) else railbind.environment(spec)
    profile = here.profile.model_copy(update={"environment": {**here.profile.environment, **preload}})
    entry = (body, (str(folder), size))
    return Request((config,), (entry,), config.run_folder, here.model_copy(update={"profile": profile}), Options())


@contextmanager
def user_of(lab: Cluster) -> Iterator[None]:
    """This process as a user of a lab."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update({**lab.environment(before), "PYTHONPATH": str(ROOT)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def await_file(path: Path, job: Job) -> None:
    """Wait for a file of a job that runs.

    Raises:
        LabError: the job has ended, or takes too long.
    """
    deadline, look = time.monotonic() + LIMIT_S, time.monotonic() + 1.0
    while not path.exists():
        now = time.monotonic()
        if now > look:
            look = now + 1.0
            if (ended := states(job.ids)[job.ids[0]].ended) or now > deadline:
                how = "have ended" if ended else f"have not answered in {LIMIT_S} s"
                raise LabError(f"the ranks on the lab {how}: {last_words(job)}")
        time.sleep(0.01)


def last_words(job: Job) -> str:
    """The last line of the job's first rank, or of its batch script."""
    logs = [job.logs / job.ids[0] / "rank-0.log", job.logs / f"slurm-{job.ids[0]}.out"]
    lines = [line for path in logs if path.exists() for line in path.read_text().splitlines()[-1:]]
    return lines[0] if lines else "they said nothing"


def measure(lab: Cluster, rounds: int, mib: float, enough: Callable[[float], bool] | None = None) -> dict[str, Any]:
    """Times, ratios and bytes of all mappings, and rows for a table.

    Args:
        enough: given the median ratio to all ranks on one rail, whether `rounds` rounds will do; else as many follow,
            up to four times.

    Raises:
        LabError: the lab has no rails, or the ranks on it fail.
    """
    spec = lab.spec
    check(spec)
    said = railbind.obstacle(spec)
    names = [name for name, mapping in MAPPINGS.items() if said is None or not mapping.bound]
    size = int(mib * 2**20)
    with fleet(lab, mib) as ranks:
        first = {name: ranks.turn(name) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for at in range(4 * rounds if enough else rounds):
            if enough and at and at % rounds == 0 and enough(statistics.median(_ratios(seconds, CROWD))):
                break
            for name in names[at % len(names) :] + names[: at % len(names)]:
                seconds[name].append(ranks.turn(name).seconds)
        foreseen, interfaces = ranks.foreseen(size), ranks.interfaces
    moved = {name: {rail: t.sent(rail) for rail in spec.rail_names} | {"spine": t.crossed} for name, t in first.items()}
    rates = {name: wire("all_reduce", size, spec.nodes) * 8e-6 / statistics.median(t) for name, t in seconds.items()}
    ratios = {name: _ratios(seconds, name) for name in seconds}
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    what = f"all-reduce of {mib:g} MiB in {spec.gpus} dp groups over {spec.nodes} lab nodes, {ALONG}"
    return {
        "spec": {key: getattr(spec, key) for key in ("nodes", "gpus", "rails", "rail_mbit", "spine_mbit")},
        "mib": mib,
        "rounds": len(seconds[ALONG]),
        "load": os.getloadavg()[0],
        "interfaces": interfaces,
        "seconds": seconds,
        "mbit_per_rank": rates,
        "times_as_fast": {name: [medians[name], min(found), max(found)] for name, found in ratios.items()},
        "as_fast_as_meant": {name: medians[name] >= least for name, least in AT_LEAST.items()},
        "foreseen": foreseen,
        "as_foreseen": _alike(moved[ALONG], foreseen),
        "bytes": moved,
        "cannot_run": {BOUND: said} if said else {},
        "rows": [
            [
                *(what, f"{rates[ALONG]:,.0f} Mbit/s a rank", f"{name}: {rates[name]:,.0f} Mbit/s a rank"),
                f"{medians[name]:.2f}",
            ]
            for name in names
            if name != ALONG
        ],
    }


def _ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    return [other / placed for placed, other in zip(seconds[ALONG], seconds[name])]


def _alike(moved: dict[str, Any], foreseen: dict[str, list[float]]) -> bool:
    """Whether each node has sent by each rail what the rank table foresees."""
    return all(
        abs(sent - wanted) <= WITHIN * wanted
        for rail, row in foreseen.items()
        for sent, wanted in zip(moved[rail], row)
    )


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=float, default=8.0)
    parser.add_argument("--quick", action="store_true", help="2 rounds, of less data")
    args = parser.parse_args()
    rounds, mib = (2, 1.0) if args.quick else (args.rounds, args.mib)
    try:
        with tempfile.TemporaryDirectory(prefix="lab-") as home, cluster(LabSpec(Path(home) / "lab", rails=4)) as lab:
            result = measure(lab, rounds, mib)
    except LabError as error:
        result = {"rows": [["all-reduce along rails", "-", f"cannot run: {error}", "-"]]}
    print(json.dumps(result, indent=1))
    for name, met in result.get("as_fast_as_meant", {}).items():
        if not met:
            print(f"warning: placement is less than {AT_LEAST[name]:g} times as fast as {name}", file=sys.stderr)
    if not result.get("as_foreseen", True):
        print("warning: rails have not carried the bytes that the rank table foresees", file=sys.stderr)


if __name__ == "__main__":
    main()
