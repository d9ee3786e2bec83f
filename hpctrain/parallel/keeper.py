"""What becomes of what backward needs: it stays, it waits elsewhere (`parallel/stash.py`), or it is computed again.

Activation checkpointing (Chen et al., arXiv 1604.06174), and its form for functions of which the consumer alone keeps
the output, as a linear does that of the norm before it: there it is the output that is not kept (Megatron-LM's
`CheckpointWithoutOutput`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hpctrain.parallel.stash import Elsewhere, Stash, unpack

Tensors = TypeVar("Tensors", Tensor, "tuple[Tensor, Tensor | None]")


class Keeper:
    """Decides it for the layers of a chunk.

    Args:
        stash: where what is kept waits, if that is not where it is.
    """

    def __init__(self, stash: Stash | None = None) -> None:
        self.stash = stash
        self._unkept: list[tuple[int, _Again]] = []

    def pack(self, tensor: Tensor) -> Tensor | Elsewhere:
        """What is kept in the place of a tensor."""
        storage = tensor.untyped_storage()._cdata
        for unkept, again in self._unkept:
            if unkept == storage:
                return _Part(again, tensor)
        return tensor if self.stash is None else self.stash.pack(tensor)

    def between(self, function: Callable[..., Tensor], then: Callable[[Tensor], Tensors], *inputs: Any) -> Tensors:
        """`then(function(*inputs))`. Backward of `then` computes what `function` returns again, and nothing keeps it.

        Args:
            function: of it backward needs the inputs alone.
            then: changes nothing in place of what it is given.
        """
        slot = _Slot()
        made = recompute(function, *inputs, keeper=self, slot=slot)
        if made.grad_fn is None:  # nothing in it is trained: there is no backward that could begin with it
            return then(made)
        with self._without(made, _Again(made.grad_fn, slot)):
            return then(made)

    @contextmanager
    def _without(self, tensor: Tensor, again: _Again) -> Iterator[None]:
        """While this holds, what is kept of a tensor is how it comes to be."""
        self._unkept.append((tensor.untyped_storage()._cdata, again))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            self._unkept.pop()


def recompute(
    function: Callable[..., Tensors], *inputs: Any, keeper: Keeper | None = None, slot: _Slot | None = None
) -> Tensors:
    """Call a function without keeping what its backward needs; its backward calls it again first.

    It returns a tensor or a tuple of them, in which there may be None.

    Args:
        keeper: says what becomes of its inputs until then.
        slot: for the tensor that it returns when it is called again, until its backward begins.
    """

    def called(*inputs: Any) -> Any:
        out = function(*(x.now() if isinstance(x, _Kept) else x for x in inputs))
        if not isinstance(out, Tensor):
            return _Ahead.apply(None, *out)  # type: ignore[no-untyped-call]
        if slot is not None and slot.awaited:
            slot.out = out.detach()
        return _Ahead.apply(slot, out)[0]  # type: ignore[no-untyped-call]

    kept = [_Kept(x) if keeper and isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
    out = cast(Tensors, checkpoint(called, *kept, use_reentrant=False, preserve_rng_state=False))
    for x in kept:
        if keeper and isinstance(x, _Kept):
            x.leave(keeper)
    if slot is not None:
        slot.awaited = True
    return out


class _Kept:
    """An input of something that is computed again: there now, and when it is wanted again."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | Elsewhere = tensor

    def leave(self, keeper: Keeper) -> None:
        """Let it wait until then."""
        assert isinstance(self._tensor, Tensor)
        self._tensor = keeper.pack(self._tensor)

    def now(self) -> Tensor:
        """The tensor."""
        return unpack(self._tensor)


class _Slot:
    """What a function returned when it was called again: there from then until all that needs it has had it.

    Attributes:
        awaited: the first call is over.
        begun: the second one was not begun by the function's own backward.
        out: of the second one.
    """

    def __init__(self) -> None:
        self.awaited = self.begun = False
        self.out: Tensor | None = None


class _Again:
    """A tensor that is computed again when it is wanted.

    Args:
        node: the `_Ahead` behind it.
        slot: what that is given.
    """

    def __init__(self, node: Any, slot: _Slot) -> None:
        self._node, self._slot = node, slot

    def value(self) -> Tensor:
        """The tensor."""
        if self._slot.out is None:
            self._slot.begun = True
            _begin(self._node)
        assert self._slot.out is not None
        return self._slot.out


class _Part:
    """A view of a tensor that is computed again."""

    def __init__(self, again: _Again, tensor: Tensor) -> None:
        self._again, self._grad, self._bytes = again, tensor.requires_grad, tensor.untyped_storage().nbytes()
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def back(self) -> Tensor:
        """The view."""
        whole = self._again.value()
        assert whole.untyped_storage().nbytes() == self._bytes, "what is computed again has the same strides"
        out = whole.as_strided(self._size, self._stride, self._offset)
        return out.requires_grad_() if self._grad else out


class _Ahead(torch.autograd.Function):
    """Identity at the end of what is recomputed, which makes that happen before any backward in it begins, and whole.

    PyTorch begins when the first tensor is asked for, in the midst of a module's backward, and ends by an exception
    in the midst of that module's second forward. ZeRO-3 counts on modules that are left as often as entered: its
    list of open ones grows for ever. Run to the end from there, it would free parameters whose backward has begun.
    """

    @staticmethod
    def forward(ctx: Any, slot: _Slot | None, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.slot = slot
        ctx.save_for_backward(torch.empty(0))
        return tuple(None if x is None else x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.slot is None or not ctx.slot.begun:
            _begin(ctx)
        if ctx.slot is not None:
            ctx.slot.out = None
        return None, *grads


def _begin(node: Any) -> None:
    """Compute again what an `_Ahead` is behind of. Once: what PyTorch then has is for one backward."""
    saved = node.saved_tensors  # reading it is what computes
    assert len(saved) == 1
