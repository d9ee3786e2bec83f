"""Rows that ranks exchange, each its own number of them: the backward of each function is the adjoint of its forward,
all rows arrive where they belong, and what is counted is what was put in."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpctrain.parallel import comm
from hpctrain.parallel.autograd import all_rows, exchange_rows, gather_rows, own_rows, scatter_rows
from hpctrain.parallel.comm import Axis
from hpctrain.telemetry.meter import Meter


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_axis(size, direct):
    """Over all ranks of the world but the first; None there."""
    group, rank = dist.new_group(list(range(1, size + 1))), dist.get_rank()
    if not direct:
        comm.Axis.direct = property(lambda self: False)
    return Axis("ep", tuple(range(1, size + 1)), rank - 1, group, Meter()) if rank else None


def pairs(axis, counts, width):
    """name: function, its input's kind and rows, its output's kind. `counts[i][j]` rows go from rank i to rank j."""
    sends, receives = counts[axis.index], [row[axis.index] for row in counts]
    sizes, whole = counts[0], sum(counts[0])
    return {
        "exchange_rows": (lambda x: exchange_rows(x, sends, receives, axis), "part", sum(sends), "part"),
        "gather_rows": (lambda x: gather_rows(x, sizes, axis), "part", sizes[axis.index], "part"),
        "scatter_rows": (lambda x: scatter_rows(x, sizes, axis), "part", whole, "part"),
        "own_rows": (lambda x: own_rows(x, sizes, axis), "once", whole, "part"),
        "all_rows": (lambda x: all_rows(x, sizes, axis), "part", sizes[axis.index], "once"),
    }


def products(size, counts, width, seed, direct):
    """Both inner products of every pair."""
    axis = make_axis(size, direct)
    if axis is None:
        return None
    out = {}
    for name, (function, kind, rows, cotangent) in pairs(axis, counts, width).items():
        x = draw(seed + axis.index * (kind == "part"), rows, width).requires_grad_()
        kept = x.detach().clone()
        y = function(x)
        weights = draw(seed + 10 + axis.index * (cotangent == "part"), *y.shape)
        kept_weights = weights.clone()
        (grad,) = torch.autograd.grad(y, x, weights)
        assert torch.equal(x, kept) and torch.equal(weights, kept_weights), f"{name} changes what it is given"
        out[name] = [_product(y.detach(), weights, cotangent, axis), _product(x.detach(), grad, kind, axis)]
    return out


def _product(a, b, kind, axis):
    each = torch.stack(comm.all_gather((a * b).sum(), axis))
    if kind == "once":
        assert torch.allclose(each, each[:1], rtol=1e-12, atol=1e-12), "replicated, but not equal"
        return each[0].item()
    return each.sum().item()


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failure is not made smaller, by a world of ranks a try
)
@given(
    size=st.integers(2, 4),
    table=st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=4, max_size=4),
    width=st.integers(1, 3),
    seed=st.integers(100, 10_000),
    direct=st.booleans(),
)
def test_backward_is_the_adjoint_of_forward(ranks, size, table, width, seed, direct):
    counts = [row[:size] for row in table[:size]]
    for outcome in ranks(size + 1, products, size, counts, width, seed, direct)[1:]:
        assert len(outcome) == 5
        for name, (left, right) in outcome.items():
            assert left == pytest.approx(right, rel=1e-10, abs=1e-10), name


def arrivals(counts, direct):
    """What arrives of rows that name their sender, receiver and place; and what is counted."""
    axis = make_axis(len(counts), direct)
    if axis is None:
        return None
    me, sends = axis.index, counts[axis.index]
    rows = [(me, to, place) for to, count in enumerate(sends) for place in range(count)]
    x = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    receives = [row[me] for row in counts]
    came = comm.start_exchange_rows(x, sends, receives, axis).wait()
    back = comm.start_exchange_rows(came, receives, sends, axis).wait()
    own = x.new_full((counts[0][me], 3), me)
    gathered = comm.start_gather_rows(own, counts[0], axis).wait()
    summed = comm.start_scatter_rows(gathered * (me + 1), counts[0], axis).wait()
    total = len(counts) * (len(counts) + 1) // 2
    found = [came.tolist(), torch.equal(back, x), torch.equal(summed, own * total)]
    return found, {operation: (t.calls, t.bytes // 24) for (operation, _), t in axis.meter.traffic.items()}


@pytest.mark.parametrize("direct", [True, False])
def test_every_row_arrives_in_order_and_is_counted(ranks, direct):
    counts = [[2, 0, 3], [0, 0, 0], [1, 4, 0]]
    for me, (found, counted) in enumerate(ranks(4, arrivals, counts, direct)[1:]):
        want = [[i, me, place] for i, row in enumerate(counts) for place in range(row[me])]
        assert found == [want, True, True]
        ways = sum(counts[me]) + sum(row[me] for row in counts)
        sizes = {"all_to_all": (2, ways), "all_gather": (1, counts[0][me]), "reduce_scatter": (1, sum(counts[0]))}
        assert counted == sizes
