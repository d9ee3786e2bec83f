"""`make bench`: everything that is measured here, and the README's table of it.

Each benchmark prints JSON and compares with its peer in one interleaved run; this script runs them one after
the other, keeps what they said in `benchmarks/results.json` and rewrites the table between the README's
`bench` markers. Nothing here is a test: the figures are of the machine it runs on.
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

BENCHMARKS = {"training": [], "data_access": [], "checkpoint_save": []}
QUICK = {"training": ["--rounds", "2", "--steps", "2"]}


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """The JSON that one benchmark prints."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
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


def rows(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, figure, beside, ratio) of the table."""
    training, data, saving = results["training"], results["data_access"], results["checkpoint_save"]
    rates = training["tokens_per_second"]
    out = [
        (
            f"train step of `{training['recipe']}`, {name}",
            f"{rates[name]:,.0f} tokens/s",
            f"plain PyTorch loop, one process: {rates['plain']:,.0f} tokens/s",
            f"{training['ratio_to_plain'][name]:.2f}",
        )
        for name in ("tp=1", "tp=2")
    ]
    return out + data_rows(data) + saving_rows(saving)


def data_rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of `benchmarks.data_access`."""
    return [tuple(row) for row in result["rows"]]


def saving_rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of `benchmarks.checkpoint_save`."""
    return [tuple(row) for row in result["rows"]]


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| what | measured | beside | ratio (median of rounds) |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(results)]
    return "\n".join([f"Measured on {results['machine']}.", "", *lines])


def write_readme(text: str) -> None:
    """Put the table between the markers."""
    readme = README.read_text()
    before, rest = readme.split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    """Run all, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--quick", action="store_true", help="few rounds, and the README is left alone")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in args.names or BENCHMARKS:
        results[name] = run(name, QUICK.get(name, []) if args.quick else BENCHMARKS[name])
    results["machine"] = machine()
    print(table(results))
    if not args.quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_readme(table(results))


if __name__ == "__main__":
    main()
