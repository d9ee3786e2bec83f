"""An embedding in the first stage of a pipeline whose weight is also the head's, in the last.

The first stage owns it. The head computes with a copy that is no parameter: it takes the owner's values once a step,
gathers the gradient of all micro-batches, and hands it back in time for the owner's last backward, in which it is added
before autograd accumulates: so an engine sees one parameter, with a complete gradient. Where both stages are on one
rank the copy is an alias. An embedding that is not trained has no gradient, and none comes back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.config.schema import RunConfig
from hpctrain.layout.placement import tied_copy
from hpctrain.layout.stages import stages
from hpctrain.parallel.comm import Axis, Leg, Pending, start_exchange
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import COMPUTE, master
from hpctrain.parallel.ticket import Computes


class Tie:
    """One rank's end, or both ends, of the tie.

    Args:
        engine: holds the embedding, on the owner.
        name: of its weight.
        blank: a tensor like it, of this rank's shape; its values do not matter.
        axis: pp.
        owner, user: indices of the first and of the last stage; this rank is one of them.
        wide: dtype in which gradients of micro-batches are added up, and handed back.
        trained: whether there are any.
    """

    def __init__(
        self,
        engine: Computes,
        name: str,
        blank: Tensor,
        axis: Axis,
        owner: int,
        user: int,
        wide: torch.dtype,
        trained: bool = True,
    ) -> None:
        self._engine, self._name, self._blank, self._wide = engine, name, blank, wide
        self._axis, self._peer = axis, user if axis.index == owner else owner
        self._owns, self._uses = axis.index == owner, axis.index == user
        self._copy: Tensor | None = None
        self._total: Tensor | None = None
        self._sent: Pending[Tensor] | None = None
        self._coming: Pending[Tensor] | None = None
        self._due, self._trained = False, trained
        if self._owns and trained:
            engine.parameter(name).register_hook(self._complete)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Give the head the embedding's present values. Goes before whatever else the two ranks send each other."""
        if self._owns and self._uses:
            self._copy = self._engine.values(self._name).requires_grad_(self._trained)
        elif self._owns:
            self._sent = self._start(self._engine.values(self._name), send=True)
        else:
            self._coming = self._start(torch.empty_like(self._blank), send=False)

    def weight(self) -> Tensor:
        """The head's copy."""
        if self._copy is None:
            assert self._coming is not None, "begin comes first"
            self._copy, self._coming = self._coming.wait().requires_grad_(self._trained), None
        return self._copy

    def collect(self) -> None:
        """Take the gradient that a backward of the last stage has left."""
        if not self._trained:
            return
        assert self._copy is not None and self._copy.grad is not None
        grad, self._copy.grad = self._copy.grad, None
        self._total = grad.to(self._wide) if self._total is None else self._total.add_(grad)

    def hand_back(self) -> None:
        """The gradient goes to the owner. Goes after whatever else the two ranks send each other."""
        if not self._trained:
            return
        if self._owns and not self._uses:
            self._coming = self._start(torch.empty_like(self._blank, dtype=self._wide), send=False)
        elif self._uses and not self._owns:
            assert self._total is not None, "the last stage has had all its backwards"
            self._sent = self._start(self._total, send=True)

    def last_backward(self) -> None:
        """What comes next is the first stage's last backward of the step."""
        self._due = self._trained

    def end(self) -> None:
        """Nothing is left under way, and nothing of the step is kept."""
        for pending in (self._sent, self._coming):
            if pending is not None:
                pending.wait()
        self._copy = self._total = self._sent = self._coming = None

    def _start(self, values: Tensor, send: bool) -> Pending[Tensor]:
        if self._sent is not None:
            self._sent.wait()
        return start_exchange([Leg(values, self._peer, send)], self._axis)[0]

    def _complete(self, grad: Tensor) -> Tensor | None:
        """Called by autograd with the embedding's gradient, before it is accumulated."""
        if not self._due:
            return None
        self._due = False
        if self._coming is not None:
            self._total, self._coming = self._coming.wait(), None
        assert self._total is not None, "the gradient was handed back before"
        return self._engine.with_gradient(self._name, grad, self._total)


def make_tie(engine: Computes, mesh: Mesh, config: RunConfig) -> Tie | None:
    """This rank's part of the tie between first and last stage; None where the model has none or the rank no part."""
    ends = stages(config.model, mesh.layout)
    owner, user = ends[0].home, ends[-1].home
    record = tied_copy(config.model, mesh.layout, mesh.rank)
    if record is None or mesh.pp.index not in (owner, user):
        return None
    assert record.tied is not None
    precision = config.train.precision
    blank = torch.empty((), dtype=COMPUTE[precision], device=mesh.device).expand(record.local_shape)
    trained = config.model.adapter is None
    return Tie(engine, record.tied, blank, mesh.pp, owner, user, master(precision), trained)
