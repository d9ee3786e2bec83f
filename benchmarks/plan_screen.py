"""How many layouts a second the planner's first tier prices on one core: all candidates of searches, not samples.

Processor seconds of one thread. A set's first time in a process plays the schedules of its pipelines; later ones find
them ready, as the next search or the next value of a sweep does.

    python -m benchmarks.plan_screen [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from hpctrain.config.load import load
from hpctrain.plan.candidates import candidates
from hpctrain.plan.constants import constants
from hpctrain.plan.hardware import hardware
from hpctrain.plan.links import Machine
from hpctrain.plan.screen import screen
from hpctrain.plan.work import Work

WANTED = 100_000
SEARCHES = (("gpt-175b", 1024, True), ("llama-70b", 512, False), ("mixtral-8x7b", 512, False))
"""Recipe, devices, and whether offloading is searched as well."""


def measure(rounds: int) -> dict[str, Any]:
    """Rates of all searches, on DGX H100."""
    found, rows = [], []
    for recipe, devices, offload in SEARCHES:
        config = load(recipe)
        machine, work = Machine(hardware("dgx-h100"), constants()).of(devices), Work.of(config)
        points = candidates(config, machine, devices, offload=offload)
        seconds = []
        for _ in range(rounds + 1):
            began = time.process_time()
            screen(machine, work, points)
            seconds.append(time.process_time() - began)
        first, later = len(points) / seconds[0], len(points) / statistics.median(seconds[1:])
        found.append(
            {
                "recipe": recipe,
                "devices": devices,
                "layouts": len(points),
                "first_s": seconds[0],
                "later_s": seconds[1:],
            }
        )
        what = f"{len(points):,} layouts of `{recipe}` on {devices:,} devices screened, one core"
        rows.append([what, f"{later:,.0f} layouts/s, the first time {first:,.0f}", f"wanted: {WANTED:,}", "-"])
    return {"rounds": rounds, "searches": found, "rows": rows}


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    args = parser.parse_args()
    print(json.dumps(measure(2 if args.quick else 9), indent=1))


if __name__ == "__main__":
    main()
