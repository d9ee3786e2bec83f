"""`hpctrain bench`: collectives and what they run beside, measured, compared, fitted."""

from __future__ import annotations

import click

from hpctrain.cli.groups import Lazy, LazyGroup

COMMANDS = {
    "collectives": Lazy("hpctrain.cli.bench_collectives:collectives", "Measure collectives, nccl-tests' way."),
    "pairs": Lazy("hpctrain.cli.bench_pairs:pairs", "Every rank with every other: matrices, and who is slow."),
    "compare": Lazy("hpctrain.cli.bench_compare:compare", "Hold a measurement against another: is it worse?"),
    "fit": Lazy("hpctrain.cli.bench_fit:fit", "Latency and bandwidth of a measurement, as a profile."),
    "overlap": Lazy("hpctrain.cli.bench_overlap:overlap", "A collective beside a stream of matrix products."),
    "mix": Lazy("hpctrain.cli.bench_overlap:mix", "The collectives of one training step of a recipe."),
    "gemm": Lazy("hpctrain.cli.bench_device:gemm", "Rates of matrix products."),
    "memory": Lazy("hpctrain.cli.bench_device:memory", "Rates of copies in memory, and to and from a GPU."),
    "nvme": Lazy("hpctrain.cli.bench_device:nvme", "Rates of a disk, as offloading uses it."),
    "sweep": Lazy("hpctrain.cli.bench_sweep:sweep", "All of it for every night, against the nights before."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def bench() -> None:
    """Test the fabric: collectives, pairs of ranks, who is slow, is it worse than last week.

    \b
    Example:
      hpctrain bench collectives --ranks 2 --sizes 1K:4M:4
    """
