"""Fit the planner's constants and write `hpctrain/plan/constants.yaml`.

Three tables are used and no other: MAMF (achievable matrix products), the NCCL sweeps, and Korthikanti T5.

    python -m benchmarks.planner.fit
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.planner.rows import korthikanti, read
from hpctrain.layout.bus import factor
from hpctrain.plan.constants import Constants, Line, Link, Training
from hpctrain.plan.gemm import Device, gemm
from hpctrain.plan.hardware import hardware, names
from hpctrain.plan.links import GAP, Group, Machine

OUT = Path(__file__).parents[2] / "hpctrain" / "plan" / "constants.yaml"

MAMF = {
    "v100": None,
    "a100-40g": ("NVIDIA A100 SXM", ""),
    "dgx-a100": ("NVIDIA A100 SXM", ""),
    "dgx-h100": ("NVIDIA H100 SXM", "NVIDIA H100 SXM"),
    "dgx-h200": ("NVIDIA H100 SXM", "NVIDIA H200 SXM"),
    "dgx-b200": ("NVIDIA B200 SXM", "NVIDIA B200 SXM"),
    "gb200-nvl72": ("NVIDIA GB200 SXM", "NVIDIA GB200 SXM"),
    "mi300x": ("AMD MI300X", ""),
    "cpu-lab": None,
}
"""Rows of the table for bf16 (fp16 is taken to be the same) and fp8, by cluster; H200 is said to be as H100 in bf16."""

HOP_INSIDE, HOP_BETWEEN = 1.9e-6, 14e-6
"""Seconds of a step of a ring over NVLink (LL128) and between hosts (Simple): NCCL's tuning model, src/graph/tuning.cc.
Not fitted: the sweeps are of one size of group each."""


STEP, MOST = 256, 20480
"""Sizes of m, n and k among which the table's maxima were looked for (compute/accelerator/benchmarks/README.md of ML
Engineering): the widest range it gives. All best shapes that the table prints are inside."""


def fastest(device: Device, width: float) -> float:
    """FLOP/s of the fastest of these products."""
    sizes = np.arange(STEP, MOST + 1, STEP, dtype=float)
    m, n = np.meshgrid(sizes, sizes)
    return max(float(np.max(2 * m * n * k / gemm(device, m, n, k, 1.0, width))) for k in sizes)


def filled_share(cluster: str, dtype: str, tflops: float) -> float:
    """Share of the peak that products reach which fill the device for ever, if the fastest of all shapes reaches
    `tflops`: the table's figures are maxima."""
    made, width = hardware(cluster), 1.0 if dtype == "fp8" else 2.0
    low, high = 0.1, 1.5
    while high - low > 2e-4:
        share = (low + high) / 2
        device = Device(made.peak(dtype) * share, made.gpu.sms.value, made.gpu.memory_bandwidth.value, GAP)
        low, high = (share, high) if fastest(device, width) < tflops * 1e12 else (low, share)
    return round((low + high) / 2, 3)


def matmul() -> dict[str, dict[str, float]]:
    """Of every cluster, by dtype."""
    rows = {(row["accelerator"], row["dtype"]): row for row in read("ml_engineering_mamf")}
    out: dict[str, dict[str, float]] = {}
    for cluster, chosen in MAMF.items():
        out[cluster] = {}
        for dtype, name in zip(("bf16", "fp8"), chosen or ()):
            if row := rows.get((name, dtype)):
                out[cluster][dtype] = filled_share(cluster, dtype, float(row["mamf_tflops"]))
        if "bf16" in out[cluster]:
            out[cluster]["fp16"] = out[cluster]["bf16"]
    out["v100"] = {"fp16": out["dgx-a100"]["fp16"]}  # not in the table
    if "fp8" not in out["mi300x"]:
        out["mi300x"]["fp8"] = out["mi300x"]["bf16"]
    out["cpu-lab"] = {"float32": 1.0, "float64": 1.0, "bf16": 1.0}  # its peak is an assumption already
    return out


Sweep = Sequence[tuple[float, float]]
"""Bytes of an all-reduce, seconds."""


def sweep(gpu: str, ranks: int) -> Sweep:
    """A sweep of the table, by the words that name its GPUs."""
    out = []
    for row in read("nccl_collective_sweeps"):
        if row["gpu"] == gpu and row["n_gpus"] == str(ranks) and row["size_bytes"] and row["busbw_gbps"]:
            size, busbw = float(row["size_bytes"]), float(row["busbw_gbps"]) * 1e9
            if row["collective"] == "all_reduce" and busbw > 1e8 and row["tool"] != "nccl-tests default":
                out.append((size, factor("all_reduce", ranks) * size / busbw))
    return sorted(out)


def search(loss: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int = 4000) -> list[float]:
    """A minimum by random steps on a logarithmic scale; the same each time."""
    dice, best, at = random.Random(0), list(start), loss(start)
    for number in range(rounds):
        step = 0.3 * (1 - number / rounds) + 0.003
        trial = [x * math.exp(dice.gauss(0, step)) if dice.random() < 0.5 else x for x in best]
        value = loss(trial)
        if value < at:
            best, at = trial, value
    return best


def link(kind: str, cluster: str, gpu: str, top: float, switch: float | None, source: str) -> Link:
    """Three lines of an in-domain link: two fitted to a sweep, and the third's latency; its rate is that of the largest
    sizes on a ring."""
    measured = sweep(gpu, 8)

    def made(values: Sequence[float]) -> Link:
        """Each line starts later than the one before and is faster."""
        first, second, third, middle, slow = (float(f"{value:.3g}") for value in values)
        rates = (top / (1 + middle) / (1 + slow), top / (1 + middle), top)
        starts = (first, first + second, first + second + third)
        lines = tuple(Line(latency=float(f"{s:.3g}"), rate=float(f"{r:.3g}")) for s, r in zip(starts, rates))
        return Link(lines=lines, all_reduce=switch, hop=HOP_INSIDE, source=source)

    def loss(values: Sequence[float]) -> float:
        tried = made(values)  # the network's place must be filled, though no group of one domain goes over it
        one = Constants(matmul={}, links={kind: tried, whole.fabric.network: tried}, training=NEUTRAL)
        group = Group(8, 8, 8)
        wrong = np.log(Machine(whole, one).collective("all_reduce", sizes, group) / times)
        return float(np.sum(wrong**2))

    whole = hardware(cluster)
    sizes, times = (np.array(column) for column in zip(*measured))
    values = search(loss, (2e-5, 3e-5, 1e-4, 0.3, 3.0))
    print(f"{kind}: root mean square error of {len(measured)} sizes {math.sqrt(loss(values) / len(measured)):.1%}")
    return made(values)


NEUTRAL = Training(matmul=1.0, memory=1.0, collective=1.0, source="neutral")


def links() -> dict[str, Link]:
    """All kinds of links."""
    table = {row["row_id"]: row for row in read("nccl_collective_sweeps")}
    rings = {
        row["gpu"]: float(row["busbw_gbps"])
        for row in table.values()
        if row["n_gpus"] == "8" and "Ring" in row["gpu"] + row["collective"]
    }
    big = {
        name: max(
            float(r["busbw_gbps"])
            for r in table.values()
            if r["gpu"] == name and r["n_gpus"] == "8" and r["busbw_gbps"]
        )
        for name in ("A100-80GB NVLink3", "H200 NVLink4 (NVLS)", "B200 NVLink5 (P6-B200)")
    }
    nvls = {name: big[name] / 1.75 for name in big}  # bytes of the input a second
    h200, b200 = rings["H200"], rings["B200 NVLS off (Ring)"]
    out = {
        "nvlink3": link(
            "nvlink3", "dgx-a100", "A100-80GB NVLink3", round(big["A100-80GB NVLink3"] / 300, 3), None, "A100 sweep"
        ),
        "nvlink4": link(
            "nvlink4",
            "dgx-h200",
            "H200 NVLink4 (NVLS)",
            round(h200 / 450, 3),
            round(nvls["H200 NVLink4 (NVLS)"] / 450, 3),
            "H200 sweep; ring with NVLS off",
        ),
        "nvlink5": link(
            "nvlink5",
            "dgx-b200",
            "B200 NVLink5 (P6-B200)",
            round(b200 / 900, 3),
            round(nvls["B200 NVLink5 (P6-B200)"] / 900, 3),
            "B200 sweep; ring with NVLS off",
        ),
    }
    out["nvlink2"] = out["nvlink3"].model_copy(update={"source": "as nvlink3, which it is half of"})
    out["xgmi4"] = out["nvlink3"].model_copy(update={"source": "no sweep in the tables: as nvlink3"})
    wide = max(float(r["busbw_gbps"]) for r in table.values() if r["gpu"] == "B200 + EFAv4 8x400Gb/s per node") / 400
    ports = next(float(r["busbw_gbps"]) for r in table.values() if r["gpu"] == "A100-SXM-80GB 2x8, 4x200G IB") / 100
    out["infiniband"] = Link(
        ranks=2,
        lines=(Line(latency=20e-6, rate=round(ports, 3)),),
        hop=HOP_BETWEEN,
        source="A100 2x8 over four 200 Gbit/s ports: busbw 91 of 100 GB/s",
    )
    out["infiniband-ndr"] = out["infiniband"].model_copy(
        update={
            "lines": (Line(latency=20e-6, rate=round(wide, 3)),),
            "source": "B200 4x8, each with a port of 400 Gbit/s: busbw 381.8 of 400 GB/s",
        }
    )
    plain = Link(lines=(Line(latency=2e-4, rate=1.0),), hop=1e-4, source="assumed for practice; measure yours")
    return out | {"shm": plain, "gloo": plain}


MEMORY = 0.88
"""Share of the data sheet's memory bandwidth that streaming reaches: BabelStream's triad on A100, about 1.75 of
2.04 TB/s (published with BabelStream, University of Bristol). Not fitted."""


FINE = 2e-4
"""To which shares are searched for; constants are written with three digits."""

GOLDEN = (math.sqrt(5) - 1) / 2


def lowest(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that has one valley is lowest: golden-section search, to `FINE`."""
    start, end = low, high
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    of_a, of_b = loss(a), loss(b)
    while high - low > FINE:
        if of_a < of_b:
            high, b, of_b = b, a, of_a
            a = high - GOLDEN * (high - low)
            of_a = loss(a)
        else:
            low, a, of_a = a, b, of_b
            b = low + GOLDEN * (high - low)
            of_b = loss(b)
    found = (low + high) / 2
    assert found - start > FINE and end - found > FINE, "the lowest place is at an end"
    return found


def least(loss: Callable[[tuple[float, float]], float], low: float = 0.4, high: float = 1.2) -> tuple[float, float]:
    """Where a function of two shares is lowest. The valley is long and narrow and lies askew, so that the second share
    is searched for along its floor."""

    def floor(second: float) -> float:
        return lowest(lambda first: loss((first, second)), low, high)

    second = lowest(lambda second: loss((floor(second), second)), low, high)
    return round(floor(second), 3), round(second, 3)


def squares(constants: Constants) -> Callable[[tuple[float, float]], float]:
    """The sum over the eight rows of T5 of squared logarithms of predicted over published, by what products and
    collectives reach in a step."""
    rows = [row for row in korthikanti() if row.table == "Korthikanti T5"]

    def loss(shares: tuple[float, float]) -> float:
        tried = constants.model_copy(update={"training": of_step(shares)})
        return sum(math.log(float(row.price(tried).time) / row.seconds) ** 2 for row in rows)

    return loss


def of_step(shares: Sequence[float]) -> Training:
    """What a step reaches of benchmarks: of products, and of collectives inside a domain."""
    source = "matmul, collective: Korthikanti T5, least squares of the logarithm; memory: BabelStream"
    return Training(matmul=shares[0], memory=MEMORY, collective=shares[1], source=source)


def training(constants: Constants) -> Training:
    """Both shares at the minimum of `squares`."""
    return of_step(least(squares(constants)))


def text(constants: Constants) -> str:
    """As YAML, with every constant on a line of its own."""
    lines = [
        "# Written by benchmarks/planner/fit.py from the tables MAMF, NCCL sweeps and Korthikanti T5. Do not edit.",
        "matmul:",
    ]
    for cluster, shares in constants.matmul.items():
        lines.append(f"  {cluster}: {{{', '.join(f'{k}: {v:g}' for k, v in shares.items())}}}")
    lines.append("links:")
    for kind, made in constants.links.items():
        lines += [f"  {kind}:", f"    ranks: {made.ranks}", "    lines:"]
        lines += [f"      - {{latency: {line.latency:g}, rate: {line.rate:g}}}" for line in made.lines]
        lines += [f"    all_reduce: {made.all_reduce:g}"] if made.all_reduce else []
        lines += [f"    hop: {made.hop:g}", f'    source: "{made.source}"']
    t = constants.training
    lines += ["training:", f"  matmul: {t.matmul:g}", f"  memory: {t.memory:g}", f"  collective: {t.collective:g}"]
    return "\n".join([*lines, f'  source: "{t.source}"', ""])


def main() -> None:
    assert set(MAMF) == set(names())
    first = Constants(matmul=matmul(), links=links(), training=NEUTRAL)
    fitted = first.model_copy(update={"training": training(first)})
    OUT.write_text(text(fitted), encoding="utf-8")
    print(text(fitted))


if __name__ == "__main__":
    main()
