"""What a step of ZeRO 3 gathers, reduces, calls and computes: ours beside DeepSpeed's own, on the Llama of `layouts`.

The table of `docs/data-parallel.md`. Counted on rank 0 of two, over one step after the first two; collectives are
counted where they leave DeepSpeed for torch.distributed, matrices apart from vectors by the size of what is gathered.

    python -m benchmarks.zero3 [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks import layouts
from hpctrain.launch.local.zygote import Zygote

NAMES = ("dp=2, ZeRO 3", "dp=2, ZeRO 3, weights kept", "DeepSpeed ZeRO 3, as lean", "DeepSpeed ZeRO 3")
STEPS = 5
"""Over which CPU time is taken, one by one; the median counts."""


class Counting:
    """DeepSpeed's backend, which counts what it is given.

    Attributes:
        counts: calls and elements by operation; gathers of at most `small` elements a rank apart.
    """

    def __init__(self, backend: Any, small: int) -> None:
        self._backend, self._small = backend, small
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def all_gather_into_tensor(self, output_tensor: Any, input_tensor: Any, *args: Any, **options: Any) -> Any:
        kind = "vectors" if input_tensor.numel() <= self._small else "matrices"
        self.counts += Counter({"gathered": output_tensor.numel(), f"gathers of {kind}": 1})
        return self._backend.all_gather_into_tensor(output_tensor, input_tensor, *args, **options)

    def reduce_scatter_tensor(self, output_tensor: Any, input_tensor: Any, *args: Any, **options: Any) -> Any:
        self.counts += Counter({"reduce-scattered": input_tensor.numel(), "reduce-scatters": 1})
        return self._backend.reduce_scatter_tensor(output_tensor, input_tensor, *args, **options)


def profile(name: str, overrides: Sequence[str]) -> dict[str, float]:
    """Of one contender, as a rank of two: counts of a step, and its CPU seconds."""
    from deepspeed.comm import comm

    contender = next(c for c in layouts.contenders("data", overrides, None) if c.name == name)
    work = contender.build(*contender.args)
    hidden = layouts.config_of(overrides, 2).model.hidden
    for _ in range(2):
        work.step()
    seconds = []
    for _ in range(STEPS):
        began = time.process_time()
        work.step()
        seconds.append(time.process_time() - began)
    backend, comm.cdb = comm.cdb, Counting(comm.cdb, hidden)
    with cProfile.Profile() as profiler:
        work.step()
    counts, comm.cdb = comm.cdb.counts, backend
    stats: Any = pstats.Stats(profiler)
    fetches = sum(calls for (_, _, function), (_, calls, *_) in stats.stats.items() if function == "fetch_sub_module")
    return {
        **counts,
        "fetches of modules": fetches,
        "function calls": stats.total_calls,
        "CPU seconds": statistics.median(seconds),
    }


def measure(overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of all contenders, what rank 0 saw."""
    parent = Zygote(layouts.IMPORTS)
    try:
        return {name: parent.run(profile, 2, name, list(overrides), timeout_s=300)[0] for name in NAMES}
    finally:
        parent.close()


def main() -> None:
    """Print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings beside those of the shape")
    args = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    print(json.dumps(measure(args.overrides), indent=1))


if __name__ == "__main__":
    main()
