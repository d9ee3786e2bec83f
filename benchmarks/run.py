"""`make bench`: everything that is measured here, and the README's table of it.

Each benchmark compares with its peer in one interleaved run and prints JSON, of which `rows` are its lines of the
table: what, measured, beside, ratio. This script runs them one after the other, keeps what they said in
`benchmarks/results.json` and rewrites the table between the README's `bench` markers. Nothing here is a test: the
figures are of the machine it runs on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- bench: written by make bench -->", "<!-- bench: end -->"

BENCHMARKS = (
    *("training", "layouts", "offload", "data_access", "data_build", "checkpoint_save", "collectives", "rails"),
    *("plan_screen", "lab_plan"),
)


def run(name: str, *options: str) -> dict[str, Any]:
    """The JSON that one benchmark prints, in a process of its own."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    print("running", " ".join(command[1:]), file=sys.stderr, flush=True)
    out = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(out[out.index("{") :])
    return result


def machine() -> str:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    import torch

    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, Python {platform.python_version()}, torch {torch.__version__}"


def table(results: dict[str, Any]) -> str:
    """Markdown: the rows of all results there are, and what machines they are of: of one, where they name no other."""
    lines = ["| what | measured | beside | ratio (median of rounds) |", "|---|---|---|---|"]
    for name in BENCHMARKS:
        lines += [f"| {' | '.join(row)} |" for row in results.get(name, {"rows": []})["rows"]]
    here = results["machine"]
    others = [(name, results[name].get("machine", here)) for name in BENCHMARKS if name in results]
    elsewhere = "".join(f"; {name} on {other}" for name, other in others if other != here)
    return "\n".join([f"Measured on {here}{elsewhere}.", "", *lines])


def write_readme(path: Path, text: str) -> None:
    """Put the table between the markers."""
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    """Run all, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--quick", action="store_true", help="few rounds, and the README is left alone")
    parser.add_argument("--megatron", metavar="PYTHON", help="for layouts: an interpreter with megatron-core")
    args = parser.parse_args()
    unknown = set(args.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    results = {} if args.quick or not RESULTS.exists() else json.loads(RESULTS.read_text())
    for name in args.names or BENCHMARKS:
        options = ["--quick"] if args.quick else []
        if name == "layouts" and args.megatron:
            options += ["--megatron", args.megatron]
        results[name] = run(name, *options) | {"machine": machine()}
    if not args.names or "machine" not in results:
        results["machine"] = machine()
    print(table(results))
    if not args.quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_readme(README, table(results))


if __name__ == "__main__":
    main()
