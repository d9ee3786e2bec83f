"""`hpctrain bench gemm`, `memory` and `nvme`: one device, one disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.bench_options import working
from hpctrain.cli.bench_unused import refuse_unused
from hpctrain.cli.outputs import Output
from hpctrain.cli.tables import columns
from hpctrain.errors import ConfigError

LARGE = {"cpu": "512,1024,2048", "cuda": "4096,8192,16384"}
"""Products that fill a device: small ones do not, and the planner would take their rate for that of all."""

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32", "float64": "float64"}
"""As the planner calls them."""


def _device(asked: str, threads: int, profile: Path | None, cluster: str) -> Any:
    """What is measured, when nothing speaks against it."""
    import torch

    from hpctrain.comms.profile import check

    if profile:
        check(profile, cluster)
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "torch sees no GPU here", "run on a GPU node, or use --device cpu")
    name = asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    refuse_unused(
        [
            ("cluster", profile is not None, "is of a profile, and goes with --profile"),
            ("threads", name == "cpu", "are of a CPU, and a GPU is measured"),
        ]
    )
    if threads:
        torch.set_num_threads(threads)
    return torch.device(name)


def _options(function: Any) -> Any:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--cluster", default="measured", show_default=True, help="The hardware that the profile is of."),
        click.option("--profile", type=Output("--profile"), help="Add the rate to this profile, for hpctrain plan."),
        click.option("--threads", type=click.IntRange(0), default=0, help="On CPUs; 0 is torch's choice."),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    ):
        function = option(function)
    return function


def _show(rows: Sequence[dict[str, Any]], as_json: bool, lines: Sequence[dict[str, object]]) -> None:
    if as_json:
        click.echo(json.dumps(list(rows), indent=2))
        return
    for line in columns(lines):
        click.echo(line)


@click.command(epilog="\b\nExample:  hpctrain bench gemm --shapes 256,512x2048x512 --dtype float32,bfloat16")
@click.option("--shapes", help="N or MxNxK, with commas between; by default 512,1024,2048, on a GPU 4096,8192,16384.")
@click.option("--dtype", "dtypes", default="float32", show_default=True, help="With commas between.")
@click.option("-n", "--iterations", type=click.IntRange(1, 10**6), default=10, show_default=True)
@_options
def gemm(
    shapes: str | None,
    dtypes: str,
    iterations: int,
    device: str,
    threads: int,
    profile: Path | None,
    cluster: str,
    as_json: bool,
) -> None:
    """Measure matrix products; a multiply-add counts as two FLOPs. A profile keeps the fastest of each dtype."""
    from hpctrain.comms.device import gemm as products
    from hpctrain.comms.device import shapes_of
    from hpctrain.comms.profile import update

    names = dtypes.split(",")
    for name in names:
        if name not in PRECISIONS:
            raise ConfigError("--dtype", name, f"must be one of {', '.join(PRECISIONS)}")
    on = _device(device, threads, profile, cluster)
    with working("products"):
        rows = list(products(shapes_of(LARGE[on.type] if shapes is None else shapes), names, iterations, on))
    if profile:
        best = {PRECISIONS[d]: max(r["flops"] for r in rows if r["dtype"] == d) for d in names}
        update(profile, cluster, matmul=best)
    _show(rows, as_json, [
        {"m": r["m"], "n": r["n"], "k": r["k"], "dtype": r["dtype"], "time (us)": f"{r['seconds'] * 1e6:.1f}",
         "TFLOP/s": f"{r['flops'] / 1e12:.4g}"} for r in rows
    ])  # fmt: skip


@click.command(epilog="\b\nExample:  hpctrain bench memory --sizes 16M,256M")
@click.option("--sizes", default="64M,256M", show_default=True, help="BEGIN:END:FACTOR, or sizes with commas between.")
@click.option("-n", "--iterations", type=click.IntRange(1, 10**6), default=10, show_default=True)
@_options
def memory(
    sizes: str, iterations: int, device: str, threads: int, profile: Path | None, cluster: str, as_json: bool
) -> None:
    """Measure copies in memory, and on a GPU to and from the host. A profile keeps the rate of the largest copy.

    A copy counts bytes read and bytes written; between host and GPU bytes count once. GB/s are 1e9 B/s.
    """
    from hpctrain.comms.device import memory as copies
    from hpctrain.comms.profile import update
    from hpctrain.comms.sizes import sizes as sizes_of

    on = _device(device, threads, profile, cluster)
    with working("copies"):
        rows = list(copies(sizes_of(sizes), iterations, on))
    if profile:
        update(profile, cluster, memory_bandwidth=[r["rate"] for r in rows if r["what"] == "copy"][-1])
    _show(rows, as_json, [
        {"what": r["what"], "size (B)": r["size"], "time (us)": f"{r['seconds'] * 1e6:.1f}",
         "GB/s": f"{r['rate'] / 1e9:.4g}"} for r in rows
    ])  # fmt: skip


@click.command(epilog="\b\nExample:  hpctrain bench nvme . --size 64M --threads 2")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--size", default="256M", show_default=True, help="Of each thread's file.")
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="At the same time.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option("--keep", is_flag=True, help="Find the best blocks too, and keep it in FOLDER for sharding.offload.path.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def nvme(folder: Path, size: str, threads: int, rounds: int, keep: bool, as_json: bool) -> None:
    """Measure the disk of FOLDER as offloading uses it: large writes and reads past the page cache, GB/s of 1e9 B/s.

    A training that offloads to a FOLDER which nobody has measured does so itself when it begins.
    """
    import shutil

    from hpctrain.comms.device import nvme as disk
    from hpctrain.comms.sizes import size as size_of

    wanted, free = size_of(size), shutil.disk_usage(folder).free
    if wanted * threads > free:
        raise ConfigError("--size", size, f"{folder} has {free >> 20} MiB free", "use a smaller one, or fewer threads")
    with working("disk"):
        rows = list(disk(folder, wanted, rounds, threads))
    _show(rows, as_json, [
        {"what": r["what"], "file (B)": r["size"], "threads": r["threads"], "direct": "yes" if r["direct"] else "no",
         "time (ms)": f"{r['seconds'] * 1e3:.1f}", "GB/s": f"{r['rate'] / 1e9:.4g}"} for r in rows
    ])  # fmt: skip
    if keep:
        from hpctrain.telemetry.disk import keep_rates, measure_disk

        with working("blocks"):
            rates = keep_rates(folder, measure_disk(folder))
        click.echo(
            f"kept for offloading: {rates.threads} blocks of {rates.block >> 20} MiB at a time, reads of "
            f"{rates.read / 1e9:.3g} GB/s, writes of {rates.write / 1e9:.3g} GB/s",
            err=as_json,
        )
