"""Expert parallelism (GShard, Lepikhin et al., arXiv 2006.16668): the experts of a layer are spread over ranks, and
tokens travel to them and back.

The ranks of one stage have a second factorisation, edp x ep x etp. Over ep each rank holds some experts whole, or, over
etp, some columns of each. A rank of tp always sends its own share of the tokens, so that no token is computed twice:
with sequence parallelism that is what it has; otherwise all ranks of tp have the same tokens, each sends an equal part
of them, and what comes back is gathered. Experts therefore see the tokens of all ranks of their ep and etp groups, and
their gradients are summed over edp alone, with no divisor: losses are sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.config.schema import CpMethod, RunConfig
from hpctrain.layout.context import spans
from hpctrain.layout.layout import split
from hpctrain.model.grouped import slots_of
from hpctrain.model.moe import by_expert, combine
from hpctrain.model.router import Capacity, Router, Routing
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.autograd import all_rows, exchange_rows, gather_rows, own_rows, scatter_rows, shared
from hpctrain.parallel.comm import Axis, all_gather, all_reduce, start_all_to_all
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.tensor import SEQ


def apply_expert_parallelism(model: Transformer, mesh: Mesh, config: RunConfig) -> None:
    """Swap how tokens come to experts, and let routers know of the other parts of their samples.

    Args:
        model: with experts that are cut already.
        mesh: this rank's view of all ranks.
        config: of the run.
    """
    sequence, method = config.parallel.sp, config.parallel.cp_method
    inner, same = (mesh.tp, mesh.alone) if sequence else (mesh.alone, mesh.tp)
    for _, layer in model.numbered_layers():
        if layer.moe is None:
            continue
        if mesh.tp.size > 1 or mesh.ep.size > 1:
            layer.moe.dispatch = ExpertDispatch(same, mesh.ep, mesh.etp, layer.moe.experts.down.shape[0])
        if inner.size > 1 or mesh.cp.size > 1:
            layer.moe.router = PartRouter(layer.moe.router, inner, mesh.cp, method)


class Route(NamedTuple):
    """How many rows go where. Rows are in the order of experts, and after travelling in that of ranks and then experts.

    Attributes:
        sends, receives: to and from each rank of ep.
        held: on each rank of etp after that.
        order: places in which the rows of all ranks of etp are in the order of experts; None where they are so.
        counts: [experts held] int64, rows of each.
    """

    sends: list[int]
    receives: list[int]
    held: list[int]
    order: Tensor | None
    counts: Tensor


class ExpertDispatch(nn.Module):
    """`LocalDispatch` to experts on many ranks.

    Args:
        tp: the ranks that hold the same tokens.
        ep: those that hold other experts, or other columns of them.
        etp: those that hold the other columns of the same experts.
        number: of experts that this rank holds, or columns of.
    """

    def __init__(self, tp: Axis, ep: Axis, etp: Axis, number: int) -> None:
        super().__init__()
        self.tp, self.ep, self.etp, self.number = tp, ep, etp, number

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, experts: nn.Module, rows: int | None) -> Tensor:
        """As `LocalDispatch`; `ids` are those of all experts of the layer, `experts` has this rank's."""
        shares = [split(len(x), self.tp.size, i)[1] for i in range(self.tp.size)]
        x, weights = own_rows(x, shares, self.tp), own_rows(weights, shares, self.tp)
        ids = torch.split(ids, shares)[self.tp.index]
        out = self._share(x, ids, weights, experts, None if rows is None else min(rows, shares[0]))
        return all_rows(out, shares, self.tp)

    def _share(self, x: Tensor, ids: Tensor, weights: Tensor, experts: nn.Module, rows: int | None) -> Tensor:
        """The same for tokens that no other rank sends."""
        everywhere = self.number * self.ep.size
        places, counts = by_expert(ids, everywhere)
        sent = x[places // ids.shape[1]]
        if rows is None:
            return combine(self._travel(sent, experts, self._route(counts)), places, weights)
        slots = slots_of(counts, torch.full_like(counts, rows), len(sent))
        padded = sent.new_zeros(everywhere * rows, x.shape[1]).index_put((slots,), sent)
        route = self._even_route(rows, x.device)
        return combine(self._travel(padded, experts, route)[slots], places, weights)

    def _travel(self, rows: Tensor, experts: nn.Module, route: Route) -> Tensor:
        """Rows in the order of experts through these, wherever they are, and back to where they were."""
        rows = exchange_rows(rows, route.sends, route.receives, self.ep)
        rows = gather_rows(rows, route.held, self.etp)
        rows = _reorder(rows, route.order, back=False)
        rows = experts(rows, route.counts)
        rows = _reorder(rows, route.order, back=True)
        rows = scatter_rows(rows, route.held, self.etp)
        return exchange_rows(rows, route.receives, route.sends, self.ep)

    @torch.no_grad()
    def _route(self, counts: Tensor) -> Route:
        """From the rows [experts] that this rank has for each expert of the layer. Collective over ep and etp."""
        mine, n = counts.view(self.ep.size, -1), self.ep.size
        coming = start_all_to_all(mine, self.ep).wait()
        every = torch.stack(all_gather(coming, self.etp))
        sizes = torch.cat([mine.sum(1), coming.sum(1), every.sum((1, 2))]).tolist()  # one wait for the device
        sends, receives, held = sizes[:n], sizes[n : 2 * n], sizes[2 * n :]
        return Route(sends, receives, held, _order(every.flatten(0, 1), sum(held)), every.sum((0, 1)))

    def _even_route(self, rows: int, device: torch.device) -> Route:
        """Where every rank sends `rows` rows to each expert: nobody has to be asked."""
        table = torch.full((self.ep.size * self.etp.size, self.number), rows, device=device)
        order = _order(table, table.numel() * rows)
        each = [self.number * rows] * self.ep.size
        return Route(each, each, [sum(each)] * self.etp.size, order, table.sum(0))


def _order(table: Tensor, total: int) -> Tensor | None:
    """Places of rows that lie by source and then expert, [sources, experts] of them, by expert and then source."""
    if len(table) == 1:
        return None
    starts = (table.flatten().cumsum(0) - table.flatten()).view_as(table)
    sizes = table.t().flatten()
    gaps = starts.t().flatten() - (sizes.cumsum(0) - sizes)
    return torch.arange(total, device=table.device) + gaps.repeat_interleave(sizes, output_size=total)


class _Reorder(torch.autograd.Function):
    """A permutation of rows: row i is that of place `order[i]`, or the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back = back
        return _reordered(x, order, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return _reordered(grads[0], order, not ctx.back), None, None


def _reorder(x: Tensor, order: Tensor | None, back: bool) -> Tensor:
    return x if order is None else _Reorder.apply(x, order, back)  # type: ignore[no-any-return, no-untyped-call]


def _reordered(x: Tensor, order: Tensor, back: bool) -> Tensor:
    return torch.empty_like(x).index_copy_(0, order, x) if back else x.index_select(0, order)


class PartRouter(Router):
    """`Router` of parts of samples, split over cp, and again with sequence parallelism. It sees its own tokens; the
    counts that loss, capacity and biases depend on are those of whole samples, and its weight's gradient is whole but
    for what an engine sums. Its loss is that of its tokens: a part of the sum.

    Args:
        router: the module replaced.
        inner: the ranks over which sequence parallelism shards a part.
        cp: the ranks that hold the other parts.
        method: that decides which rank of cp holds which.
    """

    def __init__(self, router: Router, inner: Axis, cp: Axis, method: CpMethod) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(router.__dict__)
        self.inner, self.cp = inner, cp
        self.whole = lambda counts: all_reduce(all_reduce(counts, inner), cp)
        if isinstance(router.capacity, Capacity):
            self.capacity = PartCapacity(router.capacity, inner, cp, method)

    def forward(self, x: Tensor, samples: Sequence[int], valid: Tensor | None) -> Routing:
        """As `Router`, with x [batch, seq / inner, hidden] and `valid` [batch, seq] of a rank of cp."""
        here = None if valid is None else valid.chunk(self.inner.size, SEQ)[self.inner.index]
        return super().forward(x, samples, here)

    def rows(self, seq: int) -> int:
        return min(seq, self.moe.room(seq * self.inner.size * self.cp.size))

    def matrix(self) -> Tensor:
        return shared(self.inner, self.weight)[0]


class PartCapacity(nn.Module):
    """`Capacity` of parts of samples: it takes what that takes of the whole.

    Args:
        plain: the module replaced.
        inner, cp, method: as for `PartRouter`.
    """

    def __init__(self, plain: Capacity, inner: Axis, cp: Axis, method: CpMethod) -> None:
        super().__init__()
        self.plain, self.inner, self.cp, self.method = plain, inner, cp, method

    def forward(self, ids: Tensor) -> Tensor:
        """What is taken, [batch, part of seq, top_k] bool."""
        of_rank = torch.cat(all_gather(ids, self.inner), SEQ)
        whole = torch.cat(all_gather(of_rank, self.cp), SEQ)
        places, parts = [], self.cp.size
        for index in range(parts):
            places += [torch.arange(*span) for span in spans(self.method, whole.shape[SEQ], parts, index)]
        order = torch.cat(places).argsort().to(ids.device)  # from that of ranks to that of the sample
        taken = torch.empty_like(whole, dtype=torch.bool)
        taken[:, order] = self.plain(whole[:, order])
        return taken.chunk(parts, SEQ)[self.cp.index].chunk(self.inner.size, SEQ)[self.inner.index]
