"""Gradient buckets: flat buffers whose sum over the data-parallel ranks starts while backward still runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hpctrain.parallel.comm import Axis, Pending, all_reduce_, start_all_reduce_


class Bucket:
    """One flat gradient buffer, the parameters whose gradients are views of it, and the ranks it is summed over."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, axis: Axis) -> None:
        self.parameters, self.axis = parameters, axis
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        sizes = [p.numel() for p in parameters]
        self.views = [part.view(p.shape) for part, p in zip(torch.split(self.flat, sizes), parameters)]
        self.missing = 0
        self.pending: Pending[Tensor] | None = None


class GradientBuckets:
    """Accumulates the gradients of a step in master precision and sums them over the data-parallel ranks.

    Buckets are filled in reverse order of the parameters, about the order in which backward reaches them. A
    bucket's reduction starts when the last gradient of the step has been added to it, and never before that of
    the bucket ahead of it, so that all ranks reduce in the same order whatever their backward did.

    Args:
        parameters: all that are trained, and the ranks over which the gradient of each is summed.
        dtype: of the buffers: float32, or float64.
        limit: size of a bucket, bytes.
        overlap: start early; otherwise everything is reduced in `finish`.
        apart: parameters with a bucket of their own: those of which tensor-parallel ranks hold unequal parts. In which
            order an all-reduce adds may depend on where an element lies in its buffer, and gradients of what those
            ranks hold alike are to stay equal bit for bit.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, Axis],
        dtype: torch.dtype,
        limit: int,
        overlap: bool,
        apart: Sequence[nn.Parameter] = (),
    ) -> None:
        self.overlap = overlap
        groups = _groups(list(parameters.items())[::-1], dtype, limit, set(apart))
        self.buckets = [Bucket(group, dtype, parameters[group[0]]) for group in groups]
        self._expected = 0
        self._seen: dict[nn.Parameter, int] = {}
        self._next = 0
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(bucket, view))  # type: ignore[no-untyped-call]
            for bucket in self.buckets
            for p, view in zip(bucket.parameters, bucket.views)
        ]

    def begin(self, micro_batches: int) -> None:
        """Start from zero; every parameter will be reached by up to `micro_batches` backward passes."""
        self._expected, self._next = micro_batches, 0
        self._seen = dict.fromkeys(self._seen, 0)
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing, bucket.pending = len(bucket.parameters), None
            for p, view in zip(bucket.parameters, bucket.views):
                p.grad = view if p.dtype == view.dtype else None

    def finish(self) -> None:
        """Reduce what has not been started, and wait for all."""
        for bucket in self.buckets[self._next :]:
            if self.overlap:
                bucket.pending = start_all_reduce_(bucket.flat, bucket.axis)
            else:
                all_reduce_(bucket.flat, bucket.axis)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
            for p in bucket.parameters:
                p.grad = None

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """The gradient of every parameter, in master precision."""
        return {p: view for bucket in self.buckets for p, view in zip(bucket.parameters, bucket.views)}

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            bucket.flat.mul_(factor)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, bucket: Bucket, view: Tensor):  # type: ignore[no-untyped-def]
        def accumulated(p: nn.Parameter) -> None:
            if p.grad is not view and p.grad is not None and p.grad.data_ptr() != view.data_ptr():
                view.add_(p.grad)
                p.grad = view if p.dtype == view.dtype else None
            self._seen[p] = self._seen.get(p, 0) + 1
            if self._seen[p] == self._expected:
                bucket.missing -= 1
                self._start_ready()

        return accumulated

    def _start_ready(self) -> None:
        if not self.overlap:
            return
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            bucket = self.buckets[self._next]
            bucket.pending = start_all_reduce_(bucket.flat, bucket.axis)
            self._next += 1


def _groups(
    parameters: list[tuple[nn.Parameter, Axis]], dtype: torch.dtype, limit: int, apart: set[nn.Parameter]
) -> list[list[nn.Parameter]]:
    """What goes into each bucket: parameters of one axis, in order; the bucket that is complete first comes first."""
    groups: list[list[nn.Parameter]] = []
    room: list[int] = []
    ends: list[int] = []
    filling: dict[str, int] = {}
    for index, (p, axis) in enumerate(parameters):
        size = p.numel() * dtype.itemsize
        if axis.name not in filling or size > room[filling[axis.name]] or p in apart:
            filling[axis.name] = len(groups)
            groups.append([])
            room.append(limit)
            ends.append(index)
        at = filling[axis.name]
        groups[at].append(p)
        room[at] = 0 if p in apart else room[at] - size
        ends[at] = index
    return [groups[i] for i in sorted(range(len(groups)), key=ends.__getitem__)]
