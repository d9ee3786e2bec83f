"""`hpctrain bench collectives`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.bench_options import (
    READ,
    Place,
    backend_of,
    is_rank,
    measure,
    output_options,
    place,
    place_options,
    prepare,
    show,
    together,
    warn,
)
from hpctrain.cli.bench_unused import of_groups, of_operations, refuse_unused
from hpctrain.errors import ConfigError, LaunchError

EXAMPLE = "hpctrain bench collectives --op all_reduce,all_gather --sizes 1K:4M:4 --ranks 2"

what = together(
    click.option("--op", "operations", default="all_reduce", show_default=True, help="With commas between, or all."),
    click.option(
        "--sizes", default="1K:4M:4", show_default=True, help="BEGIN:END:FACTOR, or sizes with commas between."
    ),
    click.option("--dtype", "dtypes", default="float32", show_default=True, help="With commas between."),
    click.option("--redop", "reductions", default="sum", show_default=True, help="sum, prod, max, min, avg; commas."),
    click.option(
        "--groups",
        default="world",
        show_default=True,
        help="world, node, rail, leaf, axes, tp, dp+cp, 0,1/2,3; again for more with ;",
    ),
    click.option("--layout", default="", metavar="tp=2,dp=4", help="Of the ranks, for groups by axis."),
    click.option("--fabric", default="", metavar="FILE", help="topology.conf, or output of ibnetdiscover, for leaf."),
    click.option("--alone", is_flag=True, help="Groups of a kind one after the other, not all at once."),
    click.option("--root", type=click.IntRange(0), default=0, help="Index in each group."),
    click.option("--matrix", metavar="FILE", type=READ, help="all_to_all_v: what each rank sends to each."),
)
how = together(
    click.option("-n", "--iterations", type=click.IntRange(1, 10**6), default=20, show_default=True),
    click.option("-w", "--warm-up", type=click.IntRange(0, 10**6), default=5, show_default=True),
    click.option("--confidence", type=click.FloatRange(0.0001, 1), help="Iterate until the median is known this well."),
    click.option(
        "--check",
        "checks",
        type=click.IntRange(0),
        default=1,
        show_default=True,
        help="Results of a line; the last is what the timed calls leave.",
    ),
    click.option("--barrier", is_flag=True, help="Of a group before every iteration, uncounted: nccl-tests' -z 1."),
    click.option("--graph", type=click.IntRange(0), default=0, help="CUDA: calls in a captured graph; 0 has none."),
    click.option(
        "--average",
        type=click.Choice(["mean", "max", "min", "rank0"]),
        default="mean",
        show_default=True,
        help="Of the ranks' times: nccl-tests' -a.",
    ),
    click.option(
        "--algorithm",
        "algorithms",
        default="",
        help="ring, recursive_doubling, tree, hierarchical: ours, by sends and receives; native beside them. Or all.",
    ),
    click.option("--sweep-env", metavar="NAME=V1,V2", multiple=True, help="Once for each value, in new ranks."),
    click.option("--library-algorithms", is_flag=True, help="Once for each algorithm that NCCL or MPI has for it."),
)


@click.command(epilog=f"\b\nExample:  {EXAMPLE}")
@what
@how
@place_options
@output_options
@click.option(
    "--baseline", type=click.Path(path_type=Path), multiple=True, help="Compare with it: fail if it is worse."
)
@click.option("--tolerance", type=click.FloatRange(0, 10), default=0.1, show_default=True, help="Of the comparison.")
@click.option("--note", default="", help="Kept with the result.")
@click.option("--inject", default="", hidden=True, help="Damage, for tests: JSON of a Fault.")
def collectives(
    as_json: bool,
    csv_file: Path | None,
    store: Path | None,
    png: Path | None,
    baseline: tuple[Path, ...],
    tolerance: float,
    sweep_env: tuple[str, ...],
    library_algorithms: bool,
    **given: Any,
) -> None:
    """Measure collectives, with the table and the formulas of nccl-tests.

    Alone, it starts ranks on this machine; under torchrun, srun or mpirun it is one of their ranks; with --submit it
    queues jobs. Every line is checked. The status is 1 if a result is wrong, or worse than the baseline. Of
    --library-algorithms those that the library refuses are named, and the others are measured.
    """
    from hpctrain.comms.environments import sweeps
    from hpctrain.comms.result import BenchError, check

    at = place(given)
    spec = spec_of(given, at)
    refuse_unused(
        [
            *of_operations(spec.operations),
            *of_groups(spec.groups),
            ("tolerance", bool(baseline), "is of the comparison, and goes with --baseline"),
        ]
    )
    baselines = [load_one(path) for path in baseline]  # before anything is measured
    found: list[tuple[Path, Any]] = []
    several = list(sweeps(spec.backend, spec.operations, sweep_env, library_algorithms))
    prepare(at, {"--csv": csv_file, "--store": store})
    if len(several) > 1 and is_rank():
        raise ConfigError(
            "--sweep-env" if sweep_env else "--library-algorithms",
            several[0][0],
            f"{len(several)} measurements need new ranks each, and a launcher has started these",
            "have it start this command once for each, with --env",
        )
    refused: list[LaunchError] = []
    for label, variables in several:
        here = replace(spec, note=f"{spec.note} {label}".strip(), environ={**spec.environ, **variables})
        try:
            now = measure(here, at, "collectives")
        except LaunchError as error:
            if not label:
                raise
            warn(f"{label} was refused, or failed: {error}")
            refused.append(error)
            continue
        if label and not as_json:
            click.echo(f"## {label}")
        for folder, result in now:
            show(folder, result, as_json, _numbered(csv_file, len(found)), store)
            found.append((folder, result))
    if refused and (sweep_env or len(refused) == len(several)):  # a library need not have all that it might have
        raise LaunchError(f"{len(refused)} of {len(several)} measurements failed; the first: {refused[0]}")
    if png and found:
        from hpctrain.comms.plots import curves

        curves([result for _, result in found], png)
    for _, result in found:
        check(result)
    if baseline and found:
        from hpctrain.cli.bench_compare import judge

        worse = []
        for _, result in found:
            try:
                judge(baselines, result, tolerance, as_json=False, quiet=as_json)
            except BenchError as error:
                worse.append(error)
        if worse:
            raise worse[0]


def _numbered(path: Path | None, number: int) -> Path | None:
    """Of several measurements, the second and later have a number in the name of their file."""
    return path.with_stem(f"{path.stem}-{number}") if path and number else path


def load_one(path: Path) -> Any:
    """A result in a file or folder."""
    from hpctrain.comms.load import load

    return load(str(path))


def spec_of(given: dict[str, Any], at: Place, kind: str = "collectives") -> Any:
    """The settings in what a command was given."""
    from hpctrain.comms.formulas import ALGORITHMS, OPERATIONS
    from hpctrain.comms.sizes import sizes
    from hpctrain.comms.spec import Spec

    operations = given.get("operations", "all_reduce")
    algorithms = given.get("algorithms", "")
    names = ("native", *ALGORITHMS) if algorithms == "all" else algorithms.split(",")
    matrix = given.get("matrix")
    return Spec(
        kind=kind,
        backend=backend_of(given["backend"], at),
        operations=tuple(OPERATIONS) if operations == "all" else tuple(operations.split(",")),
        sizes=sizes(given["sizes"]),
        dtypes=tuple(given.get("dtypes", "float32").split(",")),
        reductions=tuple(given.get("reductions", "sum").split(",")),
        groups=tuple(given.get("groups", "world").split(";")),
        layout=given.get("layout", ""),
        fabric=str(Path(given["fabric"]).absolute()) if given.get("fabric") else "",
        root=given.get("root", 0),
        weights=matrix.read_text() if matrix else "",
        warm_up=given["warm_up"],
        iterations=given["iterations"],
        confidence=given.get("confidence"),
        checks=given.get("checks", 0),
        barrier=given.get("barrier", False),
        graph=given.get("graph", 0),
        average=given.get("average", "mean"),
        algorithms=tuple("" if name == "native" else name for name in names),
        searches=given.get("searches", 1),
        expected=given.get("expect") or 0.0,
        alone=given.get("alone", False),
        timeout_s=given["timeout"],
        threads=given["threads"],
        note=given.get("note", ""),
        environ=dict(pair.split("=", 1) for pair in given["variables"]),
        fault=json.loads(given.get("inject") or "{}"),
    )
