"""The benchmark suite over NCCL: operations, events, graphs, barriers, algorithms. Two GPUs or more make them talk."""

from __future__ import annotations

import statistics

import pytest
import torch

from hpctrain.comms.buffers import wrong
from hpctrain.comms.environments import NCCL_HAS
from hpctrain.comms.formulas import ALGORITHMS, OPERATIONS
from hpctrain.comms.pattern import contents, values
from hpctrain.comms.result import Result
from hpctrain.comms.sizes import DTYPES
from hpctrain.comms.spec import Spec
from hpctrain.comms.torchmemory import TorchMemory
from tests.comms.test_pattern import filled
from tests.gpu.comms import measure

pytestmark = pytest.mark.gpu

WORLD = torch.cuda.device_count()
ADDED = tuple(name for name in DTYPES if name != "uint8")
LARGE = dict(operations=("all_reduce", "all_gather"), sizes=(256 << 20,), iterations=10, checks=2)
SPECS = {
    "every": dict(operations=tuple(OPERATIONS), sizes=(64, 1 << 20), checks=3, warm_up=2, iterations=5),
    "reduced": dict(
        operations=("all_reduce", "reduce", "reduce_scatter"),
        sizes=(4096,),
        dtypes=ADDED,
        reductions=("sum", "max", "min", "prod"),
    ),
    "plain": LARGE,
    "graph": LARGE | {"graph": 8},
    "barrier": LARGE | {"barrier": True},
    "both": LARGE | {"graph": 8, "barrier": True},
    "damaged": dict(
        operations=("all_gather",),
        sizes=(4096,),
        graph=2,
        checks=2,
        fault={"kind": "wrong", "rank": 0, "size": 0, "every": 2},
    ),
}
several = pytest.mark.skipif(WORLD < 2, reason="one GPU talks to nobody")


@pytest.fixture(scope="module")
def found() -> dict[str, Result]:
    """All of them by the same ranks."""
    return dict(zip(SPECS, measure(WORLD, [Spec(backend="nccl", **settings) for settings in SPECS.values()])))


def test_every_operation_is_right(found: dict[str, Result]) -> None:
    """Checked before the timed calls and after them."""
    result = found["every"]
    assert {row.operation for row in result.rows} == set(OPERATIONS) and not result.damaged
    assert all(row.checked == (0 if row.operation == "barrier" else 3) for row in result.rows)
    assert all(min(map(min, row.times)) > 0 for row in result.rows if not OPERATIONS[row.operation].paired)
    assert result.library.startswith("NCCL ") and all("cpu" not in at.device for at in result.where)


def test_every_dtype_that_nccl_adds_up_is_right(found: dict[str, Result]) -> None:
    result = found["reduced"]
    assert {(row.dtype, row.reduction) for row in result.rows} == {
        (dtype, name) for dtype in ADDED for name in ("sum", "max", "min", "prod")
    }
    assert not result.damaged


@pytest.mark.parametrize(("one", "other"), [("plain", "graph"), ("plain", "barrier"), ("barrier", "both")])
def test_graphs_and_barriers_are_right_and_take_as_long(found: dict[str, Result], one: str, other: str) -> None:
    """A replay is of the calls that were captured, not of none of them or one for all; a barrier is not counted."""
    assert not found[one].damaged and not found[other].damaged
    for a, b in zip(found[one].rows, found[other].rows):
        assert a.key == b.key and b.checked == 2 and len(b.iterations) == 10
        if WORLD > 1 or (a.operation, a.placement) == ("all_gather", "out_of_place"):  # else nothing moves
            assert 0.3 < b.seconds / a.seconds < 1.5, (a.key, a.seconds, b.seconds)


def test_a_graph_that_leaves_wrong_results_is_seen(found: dict[str, Result]) -> None:
    assert {(row.checked, row.wrong) for row in found["damaged"].rows} == {(2, 1)}


def test_events_time_the_device_and_not_the_host() -> None:
    """A copy of 1 GiB takes what the memory of such a device lets it, 0.3 to 10 TB/s read and written."""
    from hpctrain.comms.cuda import timed_events, timed_events_apart

    a, b = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    apace, apart = timed_events(lambda: b.copy_(a), 10), timed_events_apart(lambda: b.copy_(a), lambda: None, 10)
    rates = [2 * (1 << 30) / statistics.median(times) / 1e12 for times in (apace, apart)]
    assert len(apace) == len(apart) == 10 and all(0.3 < rate < 10 for rate in rates), rates


@pytest.mark.parametrize("dtype", DTYPES)
def test_patterns_on_the_gpu_are_those_of_the_cpu(dtype: str) -> None:
    what, blocks = values("all_gather", dtype, "sum", 3), contents("all_gather", 5000, 3, 1).receive
    here, there = (TorchMemory(torch.device(name)) for name in ("cpu", "cuda"))
    data = filled(blocks, what, there, dtype)
    assert torch.equal(data.cpu(), filled(blocks, what, here, dtype))
    data[77] += 1
    assert wrong(data, blocks, what, dtype, there) == 1


@several
@pytest.mark.parametrize("algorithm", ["Ring", "Tree"])
def test_algorithms_of_nccl_are_right(algorithm: str) -> None:
    assert algorithm in NCCL_HAS["all_reduce"]
    (made,) = measure(WORLD, [Spec(backend="nccl", sizes=(64, 1 << 20), checks=3)], NCCL_ALGO=algorithm)
    assert not made.damaged and made.environment["variables"]["NCCL_ALGO"] == algorithm


@several
def test_ours_pairs_and_overlap_over_nccl() -> None:
    ours = dict(sizes=(1000, 1 << 20), algorithms=ALGORITHMS, checks=2, iterations=3)
    pairs = dict(kind="pairs", sizes=(1 << 20,), iterations=5, warm_up=1)
    beside = dict(kind="overlap", sizes=(1 << 24,), iterations=5, warm_up=1)
    made = measure(WORLD, [Spec(backend="nccl", **settings) for settings in (ours, pairs, beside)])
    assert {row.algorithm for row in made[0].rows} == set(ALGORITHMS) and not made[0].damaged
    assert len(made[1].extra["pairs"]) == WORLD * (WORLD - 1) // 2 and made[1].extra["lost"] == []
    (line,) = made[2].extra["lines"]
    assert 0 <= line["fraction"] <= 1 and line["wrong"] == 0


def test_a_gpu_a_rank_is_wanted() -> None:
    with pytest.raises(AssertionError, match="needs a GPU a rank"):
        measure(WORLD + 1, [Spec(backend="nccl", sizes=(64,))])
