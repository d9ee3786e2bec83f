"""The runtime of a pipeline: it executes what `layout/schedule.py` and `layout/transfers.py` say, whatever that is.

A rank goes through its list once a step. At an exchange everything in it is posted and nothing waited for; before an
action that needs a tensor of another rank, that tensor is waited for. Shapes and dtypes of what is sent follow from
the configuration and the micro-batch, which every rank of the pipeline has read. Hidden states go forward and their
gradients back; a pipeline of one rank sends nothing and goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hpctrain.config.schema import RunConfig
from hpctrain.layout.actions import Action, Schedule, makes
from hpctrain.layout.actions import Tensor as Name
from hpctrain.layout.schedule import make_schedule
from hpctrain.layout.stages import stages_of
from hpctrain.layout.transfers import Exchange, Program, expand, proofs
from hpctrain.model.batch import Batch
from hpctrain.parallel.comm import Leg, Pending, start_exchange
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.precision import COMPUTE
from hpctrain.parallel.ticket import Computes, Ticket
from hpctrain.parallel.tied import make_tie

UNPROVED = 2
"""Tensors that an evaluation, in which nothing comes back, has sent and not waited for."""


class _Plan(NamedTuple):
    """A schedule, and of one rank its list and what each tensor it receives proves to have arrived."""

    schedule: Schedule
    program: Program
    proofs: dict[Name, tuple[Name, ...]]


@cache
def _plan(name: str, pp: int, chunks: int, micro_batches: int, training: bool, rank: int) -> _Plan:
    """Of a schedule, or of the forwards of one in the same order."""
    schedule = make_schedule(name, pp, chunks, micro_batches)
    if not training:
        forwards = tuple(tuple(a for a in order if a.kind == "forward") for order in schedule.ranks)
        schedule = Schedule(name, pp, chunks, micro_batches, forwards)
    programs = expand(schedule)
    return _Plan(schedule, programs[rank], proofs(schedule, programs, rank))


class Pipeline:
    """Runs micro-batches through the chunks of a rank.

    Args:
        engine: that holds them.
        mesh: this rank's view of all ranks.
        config: of the run.

    Attributes:
        peak_live: most forward passes whose backward was still to come or to be completed, in the last step.
    """

    def __init__(self, engine: Computes, mesh: Mesh, config: RunConfig) -> None:
        self.engine, self.mesh = engine, mesh
        self.stages = {stage.index: stage for stage in stages_of(config.model, mesh.layout, mesh.rank)}
        self.tie = make_tie(engine, mesh, config)
        self.peak_live = 0
        self._schedule = (config.parallel.schedule, mesh.pp.size, config.parallel.chunks)
        self._sequence_parts = mesh.tp.size if config.parallel.sp else 1
        self._hidden, self._dtype = config.model.hidden, COMPUTE[config.train.precision]

    def train(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of every micro-batch.

        Returns:
            The sum of this rank's losses, a float64 scalar; 0 where the last stage is on another rank.
        """
        run = _Pass(self, micro_batches, training=True)
        losses = run.through(self._plan(len(micro_batches), training=True))
        self.peak_live = run.peak_live
        return losses

    def evaluate(self, micro_batches: Sequence[Batch]) -> Tensor:
        """The losses of every micro-batch without gradients; returns as `train` does."""
        run = _Pass(self, micro_batches, training=False)
        return run.through(self._plan(len(micro_batches), training=False)) if micro_batches else run.losses

    def blank(self, batch: Batch) -> Tensor:
        """An uninitialised tensor for hidden states of a micro-batch, or their gradient."""
        size, seq = batch.tokens.shape
        shape = (size, seq // self._sequence_parts, self._hidden)
        return torch.empty(shape, dtype=self._dtype, device=self.mesh.device)

    def _plan(self, micro_batches: int, training: bool) -> _Plan:
        return _plan(*self._schedule, micro_batches, training, self.mesh.pp.index)


class _Pass:
    """One way through the list of a rank."""

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[Batch], training: bool) -> None:
        self.engine, self.mesh, self.tie = pipeline.engine, pipeline.mesh, pipeline.tie
        self.pipeline, self.batches, self.training = pipeline, micro_batches, training
        self.losses = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        self.peak_live, self.left = 0, len(micro_batches)
        self.tickets: dict[tuple[int, int], Ticket] = {}
        self.rests: dict[tuple[int, int], Callable[[], None]] = {}
        self.made: dict[Name, Tensor] = {}
        self.coming: dict[Name, Pending[Tensor]] = {}
        self.sent: dict[Name, Pending[Tensor]] = {}

    def through(self, plan: _Plan) -> Tensor:
        """Execute the list; returns the sum of the losses."""
        schedule, program, self.proofs = plan
        last_exchange = max((i for i, item in enumerate(program) if isinstance(item, Exchange)), default=-1)
        if self.tie is not None:
            self.tie.begin()
        for i, item in enumerate(program):
            if isinstance(item, Exchange):
                self._post(item)
            else:
                self._act(item, schedule)
            if i == last_exchange and self.training and self.tie is not None:
                self.tie.hand_back()
        self._let_go(list(self.sent))
        if self.tie is not None:
            self.tie.end()
        assert not (self.tickets or self.rests or self.made or self.coming), "a schedule uses everything it makes"
        return self.losses

    def _post(self, exchange: Exchange) -> None:
        """Begin all transfers of an exchange."""
        self.sent = {name: pending for name, pending in self.sent.items() if not pending.done}
        legs = []
        for transfer in exchange.transfers:
            send = transfer.way == "send"
            values = self.made.pop(transfer.tensor) if send else self._blank(transfer.tensor)
            legs.append(Leg(values, transfer.peer, send))
        for transfer, pending in zip(exchange.transfers, start_exchange(legs, self.mesh.pp)):
            if transfer.way == "send":
                self.sent[transfer.tensor] = pending
            else:
                self.coming[transfer.tensor] = pending
        if not self.training:
            self._let_go(list(self.sent)[:-UNPROVED])

    def _let_go(self, names: Iterable[Name]) -> None:
        """Keep no longer what has been sent. Over gloo a transfer that has ended says so to those alone who wait."""
        for name in names:
            if name in self.sent:
                self.sent.pop(name).wait()

    def _blank(self, name: Name) -> Tensor:
        return self.pipeline.blank(self.batches[name.micro_batch])

    def _act(self, action: Action, schedule: Schedule) -> None:
        """Compute, with what a neighbouring stage made, and keep what a neighbouring stage wants."""
        stage = self.pipeline.stages[action.stage]
        neighbour = [name for name in schedule.needs(action) if name.stage != stage.index]
        given = self._take(neighbour[0]) if neighbour else None
        made: Tensor | None = None
        if action.kind == "forward":
            made = self._forward(action, given)
        elif action.kind == "backward_weight":
            with self.mesh.meter.phase("backward"):
                self.rests.pop((action.stage, action.micro_batch))()
        else:
            made = self._backward(action, given)
        name = makes(action)
        if name is not None and schedule.target(name) is not None:
            assert made is not None
            self.made[name] = made

    def _take(self, name: Name) -> Tensor:
        """What a neighbouring stage made, on this rank or on another."""
        if name in self.made:
            return self.made.pop(name)
        taken = self.coming.pop(name).wait()
        self._let_go(self.proofs[name])
        return taken

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        stage, batch = self.pipeline.stages[action.stage], self.batches[action.micro_batch]
        tied = self.tie.weight() if self.tie is not None and stage.last else None
        with self.mesh.meter.phase("forward"):
            if self.training:
                hidden = hidden.requires_grad_() if hidden is not None else None
                ticket = self.engine.forward(stage.chunk, batch, hidden, tied)
                self.tickets[stage.index, action.micro_batch] = ticket
                self.peak_live = max(self.peak_live, len(self.tickets) + len(self.rests))
                output = ticket.output.detach()
            else:
                output = self.engine.evaluate(stage.chunk, batch, hidden, tied)
        if stage.last:
            self.losses += output
        return output

    def _backward(self, action: Action, grad: Tensor | None) -> Tensor | None:
        stage = self.pipeline.stages[action.stage]
        ticket = self.tickets.pop((stage.index, action.micro_batch))
        if stage.first:
            self.left -= 1
            if self.tie is not None and self.left == 0:
                self.tie.last_backward()
        with self.mesh.meter.phase("backward"):
            if action.kind == "backward_input":
                self.rests[stage.index, action.micro_batch] = self.engine.backward_input(ticket, grad)
            else:
                self.engine.backward(ticket, grad)
        if self.tie is not None and stage.last:
            self.tie.collect()
        return None if ticket.hidden is None else ticket.hidden.grad
