"""`hpctrain ckpt`: look at the checkpoints of a run, prove them, and merge adapters into a model. Needs no other ranks,
and but for the last no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from hpctrain.checkpoint.catalog import Listing, candidates
from hpctrain.checkpoint.catalog import ls as listings
from hpctrain.checkpoint.read import CheckpointReader
from hpctrain.checkpoint.verify import Verdict
from hpctrain.checkpoint.verify import verify as judge
from hpctrain.cli.groups import Group
from hpctrain.cli.tables import whole_lines
from hpctrain.errors import CheckpointError
from hpctrain.sharding.state import WEIGHT

PATH = click.argument("path", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group(cls=Group)
def ckpt() -> None:
    """List, verify, show and merge checkpoints.

    PATH is a run folder, its folder of checkpoints, or one checkpoint in it.
    """


@ckpt.command()
@PATH
@JSON
def ls(path: Path, as_json: bool) -> None:
    """List the checkpoints of a run, by their manifests.

    Example: hpctrain ckpt ls runs/gpt-tiny
    """
    lines = [_about(line) for line in _there(path, listings(path))]
    if as_json:
        _print_json(lines)
        return
    table = _table("step", "latest", "committed (UTC)", "size", "files", "engine", "layout", "state")
    for line in lines:
        table.add_row(
            str(line["step"]),
            "*" if line["latest"] else "",
            (line["created"] or "?").removesuffix("+00:00"),
            _size(line["bytes"]),
            _text(line["files"]),
            _text(line["engine"]),
            _layout(line["layout"]),
            line["damage"] or ("refused, set aside" if line["refused"] else "committed"),
        )
    whole_lines(sys.stdout).print(table)


@ckpt.command()
@PATH
@JSON
@click.pass_context
def verify(context: click.Context, path: Path, as_json: bool) -> None:
    """Read every byte and compare it with the checksums; exit with 1 on any damage.

    Checkpoints that a run has refused and set aside are left out, unless PATH is one of them.

    Example: hpctrain ckpt verify runs/gpt-tiny
    """
    lines = [line for line in listings(path) if not line.refused or line.path == path]
    verdicts = _judge_all(_there(path, lines))
    if as_json:
        _print_json([_verdict(v) for v in verdicts])
    else:
        table = _table("checkpoint", "size", "state")
        for v in verdicts:
            table.add_row(v.path.name, _size(v.bytes or None), "; ".join(map(str, v.damage)) or "valid")
        whole_lines(sys.stdout).print(table)
    if not all(v.valid for v in verdicts):
        context.exit(1)


def _judge_all(lines: Sequence[Listing]) -> list[Verdict]:
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(line.manifest.bytes for line in lines if line.manifest))
        return [judge(line.path, progress=lambda n: progress.advance(task, n)) for line in lines]


@ckpt.command()
@PATH
@JSON
def show(path: Path, as_json: bool) -> None:
    """Show what a checkpoint holds; of a run, the last one committed.

    Example: hpctrain ckpt show runs/gpt-tiny/checkpoints/step-00000100
    """
    reader = CheckpointReader(_there(path, candidates(path))[0])
    line = next(line for line in listings(reader.path))
    tensors = _tensors(reader)
    parameters = sum(math.prod(t["shape"]) for t in tensors if t["kind"] == WEIGHT)
    about = {**_about(line), "parameters": parameters, "scalars": reader.scalars(), "extra": reader.extra}
    if as_json:
        _print_json({**about, "tensors": tensors})
        return
    facts = Table(show_header=False, box=None)
    for label, value in (
        ("path", about["path"]),
        ("step", str(about["step"])),
        ("committed (UTC)", (about["created"] or "?").removesuffix("+00:00")),
        ("engine", _text(about["engine"])),
        ("layout", _layout(about["layout"])),
        ("parameters", f"{parameters:,}"),
        ("size", f"{_size(about['bytes'])} in {about['files']} files"),
        *((f"scalars.{name}", str(value)) for name, value in about["scalars"].items()),
    ):
        facts.add_row(label, value)
    table = _table("tensor", "kind", "shape", "dtype", "pieces")
    for t in tensors:
        table.add_row(*(str(t[column]) for column in ("name", "kind", "shape", "dtype", "pieces")))
    whole_lines(sys.stdout).print(facts, table)


@ckpt.command()
@PATH
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--base", type=click.Path(path_type=Path), help="What they were trained over, if it was moved.")
def merge(path: Path, out: Path, base: Path | None) -> None:
    """Merge adapters into the weights that they were trained over, as the run folder OUT.

    It holds weights alone, for generate, and for finetune to start from.

    Example: hpctrain ckpt merge runs/mine runs/merged
    """
    from hpctrain.train.merge import merge as made

    report = made(path, out, base)
    click.echo(f"{report.path} ({_size(report.bytes)})")


def _there(path: Path, found: list[Any]) -> list[Any]:
    if not found:
        raise CheckpointError(
            f"No checkpoint in {path}; give a run folder, its folder of checkpoints, or one checkpoint in it."
        )
    return found


def _about(line: Listing) -> dict[str, Any]:
    known = line.manifest
    extra = known.extra if known else {}
    return {
        "path": str(line.path),
        "step": line.step,
        "latest": line.latest,
        "created": known.created if known else None,
        "bytes": known.bytes if known else None,
        "files": len(known.files) + 1 if known else None,
        "engine": extra.get("engine"),
        "layout": extra.get("layout"),
        "damage": line.damage,
        "refused": line.refused,
    }


def _tensors(reader: CheckpointReader) -> list[dict[str, Any]]:
    return [
        {"name": name, "kind": kind, "shape": list(p[0].global_shape), "dtype": p[0].dtype, "pieces": len(p)}
        for (name, kind), p in sorted(reader.tensors().items())
    ]


def _verdict(verdict: Verdict) -> dict[str, Any]:
    damage = [{"file": d.file, "how": d.how} for d in verdict.damage]
    return {"path": str(verdict.path), "valid": verdict.valid, "bytes": verdict.bytes, "damage": damage}


def _table(*columns: str) -> Table:
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


def _text(value: object) -> str:
    return "?" if value is None else str(value)


def _layout(layout: object) -> str:
    if isinstance(layout, dict):
        usual = (1, None, False, "1f1b")
        wide = ["sp" if n is True else f"{key}={n}" for key, n in layout.items() if n is True or n not in usual]
        return " ".join(wide) or "1 rank"
    return _text(layout)


def _size(n: int | None) -> str:
    if n is None:
        return "?"
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n} B"
