"""Which part of the model each virtual stage of a pipeline is, and which ranks run it. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.layout import Layout, split
from hpctrain.layout.parameters import ParameterSpec, matmul_weights
from hpctrain.layout.schedule import make_schedule


@dataclass(frozen=True)
class Stage:
    """A virtual stage: consecutive layers, and with them what begins or ends the model.

    Attributes:
        index: place in the model.
        home: pp index of the ranks that run it.
        chunk: which of their chunks it is.
        layers: it holds; there may be none in the first and the last.
        first: it holds the embedding.
        last: it holds the final norm, the head and the loss.
    """

    index: int
    home: int
    chunk: int
    layers: range
    first: bool
    last: bool

    def holds(self, spec: ParameterSpec) -> bool:
        """Whether a parameter is part of it."""
        if spec.layer is not None:
            return spec.layer in self.layers
        return self.last if spec.output else self.first


@cache
def stages(model: ModelConfig, layout: Layout) -> tuple[Stage, ...]:
    """All virtual stages in the order of the model."""
    schedule, number = make_schedule(layout.schedule, layout.pp, layout.chunks, 1), layout.pp * layout.chunks
    sizes = layout.stage_layers or balanced(model.layers, number, head_cost(model))
    assert len(sizes) == number and sum(sizes) == model.layers, (sizes, number, model.layers)
    ends = [sum(sizes[: i + 1]) for i in range(number)]
    return tuple(
        Stage(i, schedule.home(i), schedule.chunk(i), range(end - size, end), i == 0, i == number - 1)
        for i, (size, end) in enumerate(zip(sizes, ends))
    )


def balanced(layers: int, number: int, head: float) -> list[int]:
    """Layers of each of `number` virtual stages, such that the dearest costs least; the larger first.

    Args:
        layers: of the model, at least `number`.
        number: of virtual stages.
        head: what the last stage has to do beside its layers, in layers.
    """

    def sizes(last: int) -> list[int]:
        return [split(layers - last, number - 1, i)[1] for i in range(number - 1)] + [last]

    if number == 1:
        return [layers]
    return min(map(sizes, range(layers // number, 0, -1)), key=lambda n: max(*n[:-1], n[-1] + head))


def head_cost(model: ModelConfig) -> float:
    """What the head costs, in layers: by the weights that a token is multiplied with, attention left out."""
    head = model.vocab * model.hidden
    return head * model.layers / (matmul_weights(model) - head)


def stages_of(model: ModelConfig, layout: Layout, rank: int) -> tuple[Stage, ...]:
    """The virtual stages that a rank runs, by chunk."""
    at = layout.coordinates(rank)["pp"]
    return tuple(stage for stage in stages(model, layout) if stage.home == at)


def shares_embedding(model: ModelConfig, layout: Layout) -> bool:
    """Whether the head, in the last stage, uses the embedding of the first, which is another one."""
    return model.tied and layout.pp * layout.chunks > 1
