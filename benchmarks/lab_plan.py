"""How well the planner foretells a cluster that it has never seen: profiles measured there, then trainings there.

A practice cluster of 4 nodes with a rail of 50 Mbit/s each comes up for the time of the measurement. `hpctrain bench`
measures collectives of all nodes and of pairs, messages, products and copies there, and writes a profile. Nodes share
the cores of one machine, which no planner knows: one training that is not among the layouts says how much slower than
alone they compute. Then layouts are priced, trained as jobs of a scaling study, and step times compared. Models are
such that rails bound the step. Nothing is fitted to the layouts' own trainings.

    python -m benchmarks.lab_plan [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.build import build
from hpctrain.data.sources import list_sources
from hpctrain.errors import LabError
from hpctrain.lab import Cluster, LabSpec, cluster
from hpctrain.launch.submit.sbatch import Options
from hpctrain.plan.constants import constants
from hpctrain.plan.constants import profile as profile_of
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import Machine
from hpctrain.scale import jobs, measure, predict, study

ROOT = Path(__file__).parent.parent
NODES, RAIL_MBIT = 4, 50
CLUSTER = "cpu-lab"
GATES = (0.15, 0.90)
"""At most this median error, at least this rank correlation."""

WIDE = ("model.layers=4", "model.hidden=256", "model.heads=4", "data.seq=64", "train.global_batch=8")
"""Many weights and few tokens: gradients bound the step."""
LONG = ("model.layers=4", "model.hidden=64", "model.heads=4", "data.seq=512", "train.global_batch=8")
"""Few weights and many tokens: activations do."""

ALONE = ("model.layers=3", "model.hidden=128", "model.heads=4", "data.seq=256", "train.global_batch=8")
"""The training on dp4 by which compute is calibrated."""

LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp4": WIDE,
    "dp4, ZeRO 1": (*WIDE, "sharding.stage=1"),
    "dp4, ZeRO 2": (*WIDE, "sharding.stage=2"),
    "dp4, ZeRO 3": (*WIDE, "sharding.stage=3"),
    "tp2 dp2": (*WIDE, "parallel.tp=2"),
    "pp2 dp2": (*WIDE, "parallel.pp=2"),
    "tp4": (*WIDE, "parallel.tp=4"),
    "tp4, long": (*LONG, "parallel.tp=4"),
    "tp4 sp, long": (*LONG, "parallel.tp=4", "parallel.sp=true"),
    "tp2 pp2, long": (*LONG, "parallel.tp=2", "parallel.pp=2"),
    "pp4, long": (*LONG, "parallel.pp=4"),
    "pp2 of 2 chunks, tp2, long": (*LONG, "parallel.tp=2", "parallel.pp=2", "parallel.schedule=interleaved",
                                   "parallel.chunks=2"),
    "cp4, long": (*LONG, "parallel.cp=4"),
    "cp2 tp2, long": (*LONG, "parallel.cp=2", "parallel.tp=2"),
}  # fmt: skip
"""By name, on 4 nodes of a rank."""

SETTINGS = ("train.micro_batch=2", "parallel.tp=1", "cluster.profile=lab", "cluster.gpus_per_node=1",
            "cluster.threads=1", "model.max_seq=512")  # fmt: skip


def bench(lab: Cluster, folder: Path, quick: bool) -> Path:
    """The profile of a lab: what its nodes measure at the same time."""
    path, tool = folder / "profile.yaml", [sys.executable, "-m", "hpctrain", "bench"]
    at = ["--cluster", CLUSTER, "--profile"]
    for what in (["gemm", "--shapes", "256"], ["memory", "--sizes", "8M"]):
        mine = f"{path}.$SLURM_NODEID"
        command = " ".join([*tool, *what, "--threads", "1", *at, mine])
        lab.run(["srun", f"--nodes={NODES}", "--ntasks-per-node=1", "bash", "-c", command], 300, cwd=ROOT)
    Path(f"{path}.0").rename(path)
    sizes = "64K:4M:4" if quick else "64K:8M:2"
    base = ["--backend", "gloo", "--dtype", "float32", "--sizes", sizes, "-n", "7", "-w", "1", "--check", "0"]
    base += ["--timeout", "300"]
    job = ["--submit", "--nodes", str(NODES), "--ranks", "1", "--profile", "lab", "--threads", "1"]
    ways = {
        "all": ("all_reduce,all_gather,reduce_scatter,all_to_all,ping_pong", "world"),
        "pairs": ("all_reduce,all_gather,reduce_scatter,all_to_all", "0,1/2,3"),
        "far": ("all_reduce,all_gather,reduce_scatter,all_to_all", "0,2/1,3"),
    }
    for name, (operations, groups) in ways.items():
        asked = ["collectives", "--op", operations, "--groups", groups, "--folder", str(folder / name)]
        lab.run([*tool, *asked, *base, *job], 900, cwd=ROOT)
    results = [str(found.parent) for found in sorted(folder.glob("*/**/result.json"))]
    lab.run([*tool, "fit", *results, "--hold", "0", "--profile", str(path), "--cluster", CLUSTER], cwd=ROOT)
    return path


def trained(
    folder: Path, corpus: Path, layouts: Mapping[str, tuple[str, ...]], steps: int, prefix: str = "l"
) -> Iterator[study.Study]:
    """A study of one size for each layout, all of whose runs are done."""
    for number, settings in enumerate(layouts.values()):
        where = (f"name={prefix}{number}", f"folder={folder}", f"data.corpus={corpus}")
        made = study.make("strong", "gpt-tiny", [*SETTINGS, *settings, *where], (NODES,), steps, 2, 1, False)
        jobs.check(made)
        jobs.queue(made, Options(), lambda text: print(text, file=sys.stderr))
        list(jobs.collected(made))
        yield made


def calibrated(machine: Machine, slower: float) -> Machine:
    """A machine whose devices compute so many times slower."""
    assert machine.profile is not None and machine.profile.memory_bandwidth is not None
    gpu = machine.hardware.gpu
    peak = {dtype: fact.model_copy(update={"value": fact.value / slower}) for dtype, fact in gpu.peak.items()}
    measured = {
        "matmul": {dtype: rate / slower for dtype, rate in machine.profile.matmul.items()},
        "memory_bandwidth": machine.profile.memory_bandwidth / slower,
    }
    return replace(
        machine,
        hardware=machine.hardware.model_copy(update={"gpu": gpu.model_copy(update={"peak": peak})}),
        profile=machine.profile.model_copy(update=measured),
        gap=machine.gap * slower,
    )


def spearman(a: list[float], b: list[float]) -> float:
    """Correlation of ranks; no two values are alike."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def compared(lab: Cluster, folder: Path, quick: bool) -> dict[str, Any]:
    """Measured and predicted, layout by layout."""
    texts = folder / "text"
    texts.mkdir()
    (texts / "a.txt").write_bytes(b"".join(b"line %d of %d\n" % (i % 97, i % 89) for i in range(20_000)))
    build(folder / "corpus.h5", list_sources([texts]), [texts])
    path = bench(lab, folder, quick)
    machine = Machine(hardware(CLUSTER).part(1), constants(), profile_of(path))
    layouts, steps = dict(list(LAYOUTS.items())[:: 4 if quick else 1]), 6 if quick else 8
    (made,) = trained(folder, folder / "corpus.h5", {"alone": ALONE}, steps, "alone")
    found, (_, plan) = measure.point(made, NODES), predict.point(machine, made, NODES)
    assert found is not None
    slower = found.parts["compute"] / plan.price.at(0)["compute"]
    machine = calibrated(machine, slower)
    print(f"compute is {slower:.2f} times slower than by the profile", file=sys.stderr)
    rows = []
    for name, made in zip(layouts, trained(folder, folder / "corpus.h5", layouts, steps)):
        found, (guess, plan) = measure.point(made, NODES), predict.point(machine, made, NODES)
        assert found is not None
        rows.append(
            {
                "layout": name,
                "measured_s": found.seconds.value,
                "half_s": found.seconds.half,
                "predicted_s": guess.seconds.value,
                "links_share": guess.exposed.value / guess.seconds.value,
                "measured_links_share": found.exposed.value / found.seconds.value,
                "bound": plan.price.bound(),
                "parts": plan.price.at(0),
            }
        )
        print(f"{name}: {rows[-1]['measured_s']:.3f} s, predicted {rows[-1]['predicted_s']:.3f} s", file=sys.stderr)
    return summary(rows) | {
        "compute_slower": slower,
        "profile": path.read_text(),
        "load": os.getloadavg()[0],
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Layouts with `measured_s` and `predicted_s`: how far predictions are off, and whether the order is right."""
    measured, predicted = ([float(row[key]) for row in rows] for key in ("measured_s", "predicted_s"))
    errors = [abs(b / a - 1) for a, b in zip(measured, predicted)]
    median, order = statistics.median(errors), spearman(measured, predicted)
    what = f"step time of {len(rows)} layouts on {NODES} lab nodes with rails of {RAIL_MBIT} Mbit/s"
    return {
        "layouts": list(rows),
        "median_error": median,
        "largest_error": max(errors),
        "rank_correlation": order,
        "gates": GATES,
        "rows": [
            [f"{what}, foretold from bench profiles", f"median error {median:.1%}", f"at most {GATES[0]:.0%}", "-"],
            ["the same, order of layouts", f"rank correlation {order:.2f}", f"at least {GATES[1]:.2f}", "-"],
        ],
    }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the layouts, few steps")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="lab-") as home:
            spec = LabSpec(Path(home) / "lab", nodes=NODES, gpus=1, rails=1, rail_mbit=RAIL_MBIT)
            with cluster(spec) as lab:
                for name in [n for n in os.environ if n.startswith(("SLURM", "SBATCH", "SRUN"))]:
                    del os.environ[name]
                os.environ.update(lab.environment(), PYTHONPATH=str(ROOT))
                result = compared(lab, Path(home), args.quick)
    except LabError as error:
        result = {"rows": [["step times foretold on the lab", "-", f"cannot run: {error}", "-"]]}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
