"""Tensor-parallel layers and the collectives under them: exact gradients, untouched inputs, the right group."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
import torch.distributed as dist

import hpctrain
from hpctrain.layout.layout import Layout
from hpctrain.parallel import comm
from hpctrain.parallel.autograd import reduce_from
from hpctrain.parallel.comm import Axis
from hpctrain.parallel.mesh import build_mesh
from hpctrain.parallel.tensor import Region, column_linear, row_linear
from hpctrain.telemetry.meter import Meter
from tests.training import CPU, make_config, make_mesh


def pair():
    """An axis of ranks 1 and 2 of three, so that a default group would be wrong."""
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    return None if rank == 0 else Axis("tp", (1, 2), rank - 1, group, Meter())


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_layers():
    """Column then row against the whole matrices; the input's gradient is used twice, once from outside."""
    axis = pair()
    if axis is None:
        return
    x, w1, w2, b = draw(0, 2, 5, 6).requires_grad_(), draw(1, 8, 6), draw(2, 6, 8), draw(3, 8)
    whole1, whole2, whole_b = (t.clone().requires_grad_() for t in (w1, w2, b))
    want = torch.nn.functional.linear(torch.nn.functional.linear(x, whole1, whole_b).sin(), whole2)
    (want * want + x).sum().backward()
    cut = slice(4 * axis.index, 4 * axis.index + 4)
    mine, a1, a2, ab = (t.detach().clone().requires_grad_() for t in (x, w1[cut], w2[:, cut], b[cut]))
    alone = Axis("self", (axis.ranks[axis.index],), 0, None, axis.meter)
    for overlap in (True, False):
        for t in (mine, a1, a2, ab):
            t.grad = None
        saved, region = mine.detach().clone(), Region(axis, overlap=overlap)
        (hidden,) = column_linear(mine, region, (alone,), [a1], [ab])
        out = row_linear(hidden.sin(), a2, None, region)
        (out * out + mine).sum().backward()
        assert torch.equal(mine, saved)
        for got, expected in (
            (out, want),
            (mine.grad, x.grad),
            (a1.grad, whole1.grad[cut]),
            (ab.grad, whole_b.grad[cut]),
            (a2.grad, whole2.grad[:, cut]),
        ):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_layers_equal_the_whole_matrices(ranks):
    ranks(3, check_layers)


def check_gradients_numerically():
    """gradcheck with a replicated consumer; every rank perturbs alike."""
    axis = pair()
    if axis is None:
        return
    alone = Axis("self", (axis.ranks[axis.index],), 0, None, axis.meter)
    w = draw(5 + axis.index, 3, 4).requires_grad_()
    v = draw(9 + axis.index, 2, 3).requires_grad_()
    x = draw(7, 2, 4).requires_grad_()

    def through_layers(x):
        (hidden,) = column_linear(x, Region(axis, overlap=True), (alone,), [w], [None])
        return row_linear(hidden.tanh(), v, None, Region(axis))

    assert torch.autograd.gradcheck(through_layers, (x,))
    y = draw(20 + axis.index, 3).requires_grad_()
    before = y.detach().clone()
    out = reduce_from(y, axis)
    grad = draw(30, 3)
    kept = grad.clone()
    out.backward(grad)
    assert torch.equal(y.detach(), before) and torch.equal(grad, kept) and torch.equal(y.grad, kept)
    torch.testing.assert_close(out.detach(), draw(20, 3) + draw(21, 3))


def test_gradients_numerically(ranks):
    ranks(3, check_gradients_numerically)


def collectives():
    """Every collective over the pair leaves its input alone and counts what it sends."""
    axis = pair()
    if axis is None:
        return None
    x = torch.arange(4.0) + 10 * axis.index
    kept = x.clone()
    results = [comm.all_reduce(x, axis), comm.all_reduce(x, axis, "max"), *comm.all_gather(x, axis)]
    assert torch.equal(x, kept)
    big = torch.full((comm.EXCHANGE_LIMIT // 4 + 1,), float(axis.index + 1))
    results.append(comm.all_reduce_(big, axis)[:2])
    objects = comm.gather_objects(("rank", axis.index), axis), comm.broadcast_object(axis.index, axis)
    counted = {key: (t.calls, t.bytes) for key, t in axis.meter.traffic.items()}
    return [r.tolist() for r in results], objects, counted


def test_collectives(ranks):
    _, first, second = ranks(3, collectives)
    assert first == second
    results, objects, counted = first
    low, high = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
    assert results == [[10.0, 12.0, 14.0, 16.0], high, low, high, [3.0, 3.0]]
    assert objects == ([("rank", 0), ("rank", 1)], 0)
    size = 4 * (comm.EXCHANGE_LIMIT // 4 + 1)
    assert counted == {("all_reduce", "tp"): (3, 32 + size), ("all_gather", "tp"): (1, 16)}


def views():
    """The ranks each view of a 2 x 2 x 2 world names, and what summing ranks over it gives."""
    mesh = build_mesh(Layout(dp=2, cp=2, tp=2), CPU, timeout_s=60)
    axes = {"tp": mesh.tp, "dp": mesh.dp, "cp": mesh.cp, "loss": mesh.loss, "model": mesh.model, "world": mesh.world}
    sums = {name: comm.all_reduce(torch.tensor([float(mesh.rank)]), a).item() for name, a in axes.items()}
    return {name: a.ranks for name, a in axes.items()}, sums


def test_each_view_of_the_mesh_is_its_own_group(ranks):
    outcomes = ranks(8, views)
    assert outcomes[5][0] == {
        "tp": (4, 5), "dp": (1, 5), "cp": (5, 7), "loss": (1, 3, 5, 7), "model": (4, 5), "world": tuple(range(8)),
    }  # fmt: skip
    for names, sums in outcomes:
        assert sums == {name: float(sum(members)) for name, members in names.items()}


def replicas():
    config = make_config(parallel=dict(tp=4), model=dict(kv_heads=2))
    mesh = make_mesh(config, 4)
    from hpctrain.layout.placement import placements

    records = placements(config.model, mesh.layout, mesh.rank)
    names = ("layers.0.attention.qkv.k.weight", "layers.0.attention.qkv.q.weight", "norm.weight")
    return [mesh.partial(records[n]).ranks for n in names]


def test_key_value_heads_are_summed_over_the_ranks_that_share_them(ranks):
    assert [o[0] for o in ranks(4, replicas)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert all(o[1] == o[2] == (rank,) for rank, o in enumerate(ranks(4, replicas)))


def test_no_collective_is_called_outside_its_home():
    """A call through torch.distributed elsewhere could fall back to the default group, uncounted. Benchmarks and
    the health of a job measure the bare call, with nothing counted in it, on groups that they name."""
    allowed = {"parallel/comm.py", "launch/local/zygote.py", "comms/torchbackend.py", "launch/health/measure.py"}
    names = {n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv"))}
    names |= {"isend", "irecv", "batch_isend_irecv", "barrier"}
    root = Path(hpctrain.__file__).parent
    for path in root.rglob("*.py"):
        if str(path.relative_to(root)) in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.value, ast.Name):
                assert node.value.id != "dist", f"{path}:{node.lineno} calls dist.{node.attr}"
