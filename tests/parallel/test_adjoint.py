"""Every pair of collectives: backward is the adjoint of forward, <A x, y> = <x, A* y>; nothing is changed in place.

A replicated tensor is counted once, of a partial or sharded one each rank's part. So the identity also fails for a
gradient that is averaged, not summed, or summed where it was whole.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpctrain.parallel import comm
from hpctrain.parallel.autograd import own_part, reduce_from, reduce_scatter_from, reshard, shared
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.tensor import Region, column_linear, row_linear
from hpctrain.telemetry.meter import Meter


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs(axis, shape, dim):
    """name: function, kind and shape of its input, kind of its gradient's input (the output's cotangent)."""
    batch, part, hidden = shape
    whole = tuple(n * axis.size if d == dim else n for d, n in enumerate(shape))
    seq = (batch, part * axis.size, hidden)
    alone = Axis("self", (axis.ranks[axis.index],), 0, None, axis.meter)
    weight = draw(50 + axis.index, 3, hidden)
    found = {
        "reduce_from": (lambda x: reduce_from(x, axis), "part", shape, "once"),
        "reduce_scatter_from": (lambda x: reduce_scatter_from(x, axis, dim), "part", whole, "part"),
        "own_part": (lambda x: own_part(x, axis, dim), "once", whole, "part"),
        "reshard": (lambda x: reshard(x, axis, dim, (dim + 1) % 3), "part", whole, "part"),
        "shared": (lambda x: shared(axis, x, x.new_zeros(2))[0], "once", shape, "part"),
    }
    for region in (Region(axis, sequence, overlap) for sequence in (False, True) for overlap in (False, True)):
        outside, kind = (shape, "part") if region.sequence else (seq, "once")
        found |= {
            f"column {region}": (
                lambda x, region=region: column_linear(x, region, (alone,), [weight], [None])[0], kind, outside, "part"
            ),
            f"row {region}": (
                lambda x, region=region: row_linear(x, weight.T.contiguous(), None, region), "part", (*seq[:2], 3), kind
            ),
        }  # fmt: skip
    return found


def products(size, shape, dim, seed, direct):
    """Both inner products of every pair, over an axis that is not the world."""
    group, rank = dist.new_group(list(range(1, size + 1))), dist.get_rank()
    if rank == 0:
        return None
    axis = Axis("tp", tuple(range(1, size + 1)), rank - 1, group, Meter())
    if not direct:
        comm.Axis.direct = property(lambda self: False)
    out = {}
    for name, (function, kind, input_shape, cotangent) in pairs(axis, shape, dim).items():
        x = draw(seed + axis.index * (kind == "part"), *input_shape).requires_grad_()
        kept = x.detach().clone()
        y = function(x)
        weights = draw(seed + 10 + axis.index * (cotangent == "part"), *y.shape)
        kept_weights = weights.clone()
        (grad,) = torch.autograd.grad(y, x, weights, retain_graph=True)
        (again,) = torch.autograd.grad(y, x, weights)
        assert torch.equal(grad, again), f"{name}: a second backward gives another gradient"
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
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    dim=st.integers(0, 2),
    seed=st.integers(100, 10_000),
    direct=st.booleans(),
)
def test_backward_is_the_adjoint_of_forward(ranks, size, shape, dim, seed, direct):
    for outcome in ranks(size + 1, products, size, shape, dim, seed, direct)[1:]:
        assert len(outcome) == 13
        for name, (left, right) in outcome.items():
            assert left == pytest.approx(right, rel=1e-10, abs=1e-10), name


def joined(direct):
    """What gathers and scatters along every dim give, and what they count."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("tp", tuple(range(size)), rank, dist.new_group(list(range(size))), Meter())
    if not direct:
        comm.Axis.direct = property(lambda self: False)
    whole, found = draw(1, 3, 6, 9), []
    for dim in range(3):
        part = whole.chunk(size, dim)[rank]
        found.append(torch.equal(torch.cat(comm.start_all_gather(part, axis).wait(), dim), whole))
        mine = (whole * (rank + 1)).chunk(size, dim)
        summed = comm.start_reduce_scatter(lambda i, mine=mine: mine[i].contiguous(), axis).wait()
        found.append(torch.allclose(summed, part * sum(range(1, size + 1)), rtol=1e-14))
    return found, {key: (t.calls, t.bytes) for key, t in axis.meter.traffic.items()}


@pytest.mark.parametrize("direct", [True, False])
def test_gathers_and_scatters_along_every_dim(ranks, direct):
    for found, counted in ranks(3, joined, direct):
        assert found == [True] * 6
        assert counted == {("all_gather", "tp"): (3, 3 * 8 * 54), ("reduce_scatter", "tp"): (3, 3 * 8 * 162)}


def traded(direct):
    """What an all-to-all gives, whether resharding and back is the identity, and what is counted."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = Axis("cp", tuple(range(size)), rank, dist.new_group(list(range(size))), Meter())
    if not direct:
        comm.Axis.direct = property(lambda self: False)
    found = comm.start_all_to_all(torch.tensor([[10.0 * rank + i, -i] for i in range(size)]), axis).wait()
    counted = {key: (t.calls, t.bytes) for key, t in axis.meter.traffic.items()}
    whole = draw(1, 2, 6, 9)
    rows = reshard(whole.chunk(size, 2)[rank], axis, split=1, join=2)
    assert torch.equal(rows, whole.chunk(size, 1)[rank])
    assert torch.equal(reshard(rows, axis, split=2, join=1), whole.chunk(size, 2)[rank])
    return found.tolist(), counted


@pytest.mark.parametrize("direct", [True, False])
def test_all_to_all(ranks, direct):
    for rank, (found, counted) in enumerate(ranks(3, traded, direct)):
        assert found == [[10.0 * i + rank, -rank] for i in range(3)]
        assert counted == {("all_to_all", "cp"): (1, 3 * 2 * 4)}
