"""The routers of a rank's chunks: their counts of a step, the biases that balance the load, and the report.

Every rank of tp and cp knows the counts of whole samples, so they are summed over dp alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hpctrain.config.schema import RunConfig
from hpctrain.model.router import Load, give_biases, routers_of
from hpctrain.parallel.comm import all_reduce, all_reduce_
from hpctrain.parallel.mesh import Mesh
from hpctrain.sharding.state import WEIGHT, Piece, StateReader


class Routers:
    """State and counts of the routers that a rank holds.

    A bias moves once in an optimizer step, by `bias_rate` up where an expert had less than the mean and down where it
    had more: loss-free balancing (Wang et al., arXiv 2408.15664). The counts are those of the whole global batch.

    Args:
        chunks: of the rank.
        mesh: this rank's view of all ranks.
        config: of the run.
    """

    def __init__(self, chunks: Sequence[nn.Module], mesh: Mesh, config: RunConfig) -> None:
        self._mesh, self._model = mesh, config.model
        self._routers = {name: router for chunk in chunks for name, router in routers_of(chunk).items()}
        self._biases = {name: bias for chunk in chunks for name, bias in give_biases(chunk, mesh.device).items()}

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        for router in self._routers.values():
            router.tally.clear()

    def step(self) -> None:
        """Move the biases. Collective over dp."""
        rate = self._model.moe.bias_rate if self._model.moe else None
        if not rate or not self._biases:
            return
        counts = all_reduce(torch.stack([Load.of(self._count(name)).experts for name in self._routers]), self._mesh.dp)
        for count, bias in zip(counts, self._biases.values()):
            bias += rate * (count.sum() - len(count) * count).sign().to(bias.dtype)  # of whole numbers

    def report(self) -> dict[str, float]:
        """Of the step before, the same on every rank; empty where the model has no routers. Collective.

        Losses are a token's and a layer's mean, without their weights; load imbalance is the largest load of an
        expert over the mean; dropped are choices, over all layers.
        """
        moe, mesh = self._model.moe, self._mesh
        layers = [i for i in range(self._model.layers) if self._model.routed(i)]
        if moe is None or not layers:
            return {}
        table = torch.zeros(len(layers), moe.experts + 4, dtype=torch.float64, device=mesh.device)
        for row, layer in zip(table, layers):
            if mesh.cp.index == 0 and (name := f"layers.{layer}.moe.router") in self._routers:
                row += self._count(name)
        loads = [Load.of(row) for row in all_reduce_(table, mesh.total).cpu()]
        imbalance = {layer: _over_mean(load.experts) for layer, load in zip(layers, loads)}
        tokens = max(float(loads[0].tokens), 1.0) * len(layers)
        return {
            "moe/aux_loss": sum(float(load.aux) for load in loads) / tokens,
            "moe/z_loss": sum(float(load.z) for load in loads) / tokens,
            "moe/dropped_tokens": sum(float(load.dropped) for load in loads),
            "moe/load_imbalance": max(imbalance.values()),
            **{f"moe/load_imbalance_layer_{layer}": value for layer, value in imbalance.items()},
        }

    def pieces(self) -> Iterator[Piece]:
        """The biases, each written by one rank; with adapters they are the base's, and do not move."""
        here = self._mesh
        if here.loss.index == here.tp.index == 0 and self._model.adapter is None:
            for name, bias in self._biases.items():
                shape = tuple(bias.shape)
                yield Piece(name, WEIGHT, shape, (0,), shape, bias.dtype, bias.cpu)

    def load(self, reader: StateReader) -> None:
        """Take the biases from a checkpoint."""
        load_biases(self._biases, reader)

    def _count(self, name: str) -> Tensor:
        """[experts + 4] float64, of this rank's samples."""
        router = self._routers[name]
        total = router.tally.total()
        zeros = torch.zeros(router.moe.experts + 4, dtype=torch.float64, device=self._mesh.device)
        return zeros if total is None else total


def load_biases(biases: dict[str, Tensor], reader: StateReader) -> None:
    """Fill the biases of routers, by name, from a checkpoint."""
    for name, bias in biases.items():
        bias.copy_(reader.read(name, WEIGHT, (0,), tuple(bias.shape)))


def _over_mean(load: Tensor) -> float:
    return float(load.max() / load.mean()) if load.sum() else 1.0
