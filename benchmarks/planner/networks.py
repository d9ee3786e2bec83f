"""What the tables say of networks, which no table is fitted for: errors with networks as in their sweeps, and slower by
what collectives inside a domain are in a step; and those of ZeRO-3 of 2021 with all ports of its hosts.

    python -m benchmarks.planner.networks
"""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.planner.fit import least, of_step, squares
from benchmarks.planner.nemo import CLOSE, judge
from benchmarks.planner.reproduce import Summary, by_table, compare
from benchmarks.planner.rows import everything, read, sc21_table2
from hpctrain.plan.constants import Constants, constants

NETWORKS = ("infiniband", "infiniband-ndr")


def slowed(made: Constants, share: float) -> Constants:
    """Constants with networks at a share of their rate, and T5's fitted again."""
    links = dict(made.links)
    for kind in NETWORKS:
        lines = tuple(line.model_copy(update={"rate": line.rate * share}) for line in links[kind].lines)
        links[kind] = links[kind].model_copy(update={"lines": lines})
    made = made.model_copy(update={"links": links})
    return made.model_copy(update={"training": of_step(least(squares(made)))})


def of_all_ports() -> list[float]:
    """Errors of ZeRO-3 of 2021 where it uses all ports of a host, percent."""
    rows = []
    for row in sc21_table2("ZeRO-3"):
        work = replace(row.work, runtime=replace(row.work.runtime, one_port=False))
        rows.append(replace(row, work=work))
    return [one.error for one in compare(rows, constants())]


def main() -> None:
    now = constants()
    for share in (0.5, now.training.collective, 1.0):
        made = slowed(now, share)
        at = made.training.matmul, made.training.collective
        off = math.sqrt(squares(made)(at) / 8)
        print(f"networks at {share:g}: products {at[0]:g}, collectives {at[1]:g}, T5 off by {off:.2%}")
        for name, mine in by_table(compare(everything(), made)).items():
            print(f"  {name}: mean {Summary.of([one.error for one in mine]).mean:.2f}%")
        ratios = [one.ratio for row in read("nvidia_nemo_recommended_layouts") if (one := judge(row, made)).ratio]
        print(f"  NVIDIA's layouts: {sum(ratio <= CLOSE for ratio in ratios if ratio)} of {len(ratios)}")
    print("ZeRO-3 with all ports: " + ", ".join(f"{error:+.0f}%" for error in of_all_ports()))


if __name__ == "__main__":
    main()
