"""`hpctrain doctor`: what this machine has, what it lacks and what that costs; builds DeepSpeed's ops."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.machine import machine
from hpctrain.cli.tables import whole_lines


@click.command(epilog="Example: hpctrain doctor --build-ops fused_adam cpu_adam")
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--build-ops", is_flag=True, help="Build the named DeepSpeed ops, or all; takes minutes each.")
@click.option("--clean-locks", is_flag=True, help="Remove build locks that are proven to be left over.")
@click.option("--timeout", type=click.FloatRange(min=1), default=1800.0, show_default=True, help="Seconds for one op.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(
    ctx: click.Context, ops: tuple[str, ...], build_ops: bool, clean_locks: bool, timeout: float, as_json: bool
) -> None:
    """Say what this machine has, what it lacks and what that costs.

    OP is fused_adam, cpu_adam or async_io. A lock left by a build that was killed makes every later build wait
    for ever; such locks are found and named.
    """
    from hpctrain.sharding.deepspeed import ops as ops_module

    if ops and not build_ops:
        raise click.UsageError("ops are named for --build-ops only.")
    names, folder = ops_module.op_names(ops), ops_module.extensions_folder()
    report: dict[str, Any] = {}
    if clean_locks:
        report["removed"] = [str(lock.path) for lock in ops_module.clean_locks(folder)]
    if build_ops:
        report["builds"] = [_plain(outcome) for outcome in _build(names, folder, timeout, quiet=as_json)]
    report["machine"] = [asdict(fact) for fact in machine()]
    status = [ops_module.op_status(name, folder, ops_module.obstacle) for name in ops_module.BUILDERS]
    report["ops"] = [asdict(s) | {"use": ops_module.USES[s.name]} for s in status]
    report["locks"] = [_plain(lock) for lock in ops_module.find_locks(folder)]
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report)
    if any(not build["ok"] for build in report.get("builds", [])):
        ctx.exit(1)


def _build(names: list[str], folder: Path, timeout: float, quiet: bool) -> list[Any]:
    """Build ops one after another under our lock, with progress on stderr."""
    from rich.console import Console

    from hpctrain.sharding.deepspeed.ops import build_lock, build_op

    console, outcomes = Console(stderr=True, quiet=quiet), []
    with build_lock(folder):
        for name in names:
            with console.status(f"building {name} (up to {timeout:g} s)"):
                outcomes.append(build_op(name, folder, timeout))
    return outcomes


def _plain(record: Any) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(record).items()}


def _show(report: dict[str, Any]) -> None:
    from rich.table import Table

    console = whole_lines(sys.stdout)

    def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        made = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
        for row in rows:
            made.add_row(*row)
        console.print(made, "")

    table("This machine", ("", "found", "so"), [(f["name"], f["found"], f["costs"]) for f in report["machine"]])
    table("DeepSpeed ops", ("op", "state", "", "for"), [tuple(o.values()) for o in report["ops"]])
    for path in report.get("removed", []):
        console.print(f"removed the stale lock {path}", soft_wrap=True)
    for lock in report["locks"]:
        mend = {
            "stale": "remove it with hpctrain doctor --clean-locks",
            "in use": "let the build end",
            "cannot tell": "if no build is running on any host, delete the file",
        }[lock["verdict"]]
        console.print(f"build lock {lock['path']}: {lock['verdict']} ({lock['detail']}); {mend}", soft_wrap=True)
    for build in report.get("builds", []):
        verdict = "built" if build["ok"] else f"FAILED: {build['detail']} (see {build['log']})"
        console.print(f"{build['name']}: {verdict} after {build['seconds']:.0f} s", soft_wrap=True)
