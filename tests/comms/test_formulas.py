"""The table of formulas held against nccl-tests' own figures, and sizes as people write them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hpctrain.comms.formulas import OPERATIONS, algbw, busbw, counts
from hpctrain.comms.sizes import named, size, sizes
from hpctrain.errors import ConfigError

RANKS = (2, 4, 8, 16, 64)
TWICE = (1.0, 1.5, 1.75, 1.875, 1.96875)
ONCE = (0.5, 0.75, 0.875, 0.9375, 0.984375)
ORACLE = {
    "all_reduce": TWICE,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter"), ONCE),
    **dict.fromkeys(("broadcast", "reduce", "sendrecv", "ping_pong"), (1.0,) * 5),
    "bidirectional": (2.0,) * 5,
}
"""nccl-tests' factors at 2, 4, 8, 16 and 64 ranks, as published; the last two are ours."""


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "barrier"])
def test_factors(operation: str) -> None:
    assert tuple(busbw(operation, 10**9, 1.0, n) for n in RANKS) == ORACLE[operation]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_and_barriers_have_no_bus(operation: str) -> None:
    assert busbw(operation, 1 << 20, 1e-3, 1) is None
    assert busbw("barrier", 0, 1e-3, 8) is None


def test_gigabytes_are_decimal() -> None:
    assert algbw(1 << 30, 1.0) == 1.073741824


def test_published_rows_of_nccl_tests_agree() -> None:
    """Their time gives their algbw and busbw: A100, 8 ranks."""
    file = Path(__file__).parents[2] / "hpctrain/comms/published.csv"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["time_us"] and row["algbw_GB/s"]]
    assert len(rows) >= 20
    for row in rows:
        seconds, bytes_ = float(row["time_us"]) / 1e6, int(row["size_bytes"])
        assert algbw(bytes_, seconds) == pytest.approx(float(row["algbw_GB/s"]), rel=0.011, abs=0.006)
        assert busbw("all_reduce", bytes_, seconds, int(row["n_gpus"])) == pytest.approx(
            float(row["busbw_GB/s"]), rel=0.011, abs=0.006
        )


def test_counts_are_those_of_nccl_tests() -> None:
    """A part is a multiple of 16 bytes; the size is what is really sent."""
    assert counts("all_reduce", 1000, 3, 4) == (counts("broadcast", 1000, 3, 4))
    assert (counts("all_reduce", 1001, 3, 4).count, counts("all_reduce", 1001, 3, 4).size) == (250, 1000)
    for operation in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        found = counts(operation, 1000, 3, 4)
        assert (found.count, found.size) == (80, 960), operation
    assert counts("all_gather", 4, 3, 4).size == 12
    assert counts("all_reduce", 1, 3, 8).size == 8
    assert counts("barrier", 1 << 20, 3, 4).size == 0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1K:8K:2", (1024, 2048, 4096, 8192)),
        ("1K:10K:3", (1024, 3072, 9216)),
        ("4M,1k,512", (512, 1024, 4 << 20)),
        ("1G:4G", (1 << 30, 2 << 30, 4 << 30)),
        ("8:9:1.2", (8,)),
        ("2MiB,2M", (2 << 20,)),
    ],
)
def test_sizes(text: str, found: tuple[int, ...]) -> None:
    assert sizes(text) == found


@pytest.mark.parametrize("text", ["", "1X", "4K:1K:2", "1K:4K:1", "1K:4K:2:2", "-1", "0", "2T", "1K:4K:x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sizes"):
        sizes(text)


def test_sizes_have_short_names() -> None:
    assert [named(n) for n in (8, 1024, 1536, 1 << 20, 3 << 29)] == ["8", "1K", "1.5K", "1M", "1.5G"]
    assert size(named(3 << 29)[:-1].split(".")[0] + "G") == 1 << 30
