"""Which part of the model each virtual stage of a pipeline is, and which ranks run it. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.layout import Layout
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
    homes = tuple(schedule.home(i) for i in range(number))
    sizes = layout.stage_layers or balanced(model.layers, homes, head_cost(model))
    assert len(sizes) == number and sum(sizes) == model.layers, (sizes, number, model.layers)
    ends = [sum(sizes[: i + 1]) for i in range(number)]
    return tuple(
        Stage(i, schedule.home(i), schedule.chunk(i), range(end - size, end), i == 0, i == number - 1)
        for i, (size, end) in enumerate(zip(sizes, ends))
    )


def balanced(layers: int, homes: Sequence[int], head: float) -> tuple[int, ...]:
    """Layers of each virtual stage, such that the busiest rank has least to do; then, that the dearest stage costs
    least. Equals go to the earlier stage. All but the last have a layer at least.

    Args:
        layers: of the model, at least as many as there are stages.
        homes: the rank that runs each virtual stage.
        head: what the last stage has to do beside its layers, in layers.
    """

    def work(sizes: Sequence[int]) -> dict[int, float]:
        """What each rank has to do, in layers."""
        total: dict[int, float] = dict.fromkeys(homes, 0.0)
        total[homes[-1]] += head
        for home, size in zip(homes, sizes):
            total[home] += size
        return total

    def with_last(last: int) -> tuple[int, ...]:
        """The fairest with so many layers in the last stage: each further one goes to the rank that has least."""
        sizes = [1] * (len(homes) - 1) + [last]
        for _ in range(layers - sum(sizes)):
            busy = work(sizes)
            sizes[min(range(len(homes) - 1), key=lambda i: (busy[homes[i]], sizes[i], i))] += 1
        return tuple(sizes)

    def cost(sizes: tuple[int, ...]) -> tuple[float, float]:
        return max(work(sizes).values()), max(*sizes[:-1], sizes[-1] + head)

    if len(homes) == 1:
        return (layers,)
    return min(map(with_last, range(layers // len(homes), -1, -1)), key=cost)


def even(layers: int, number: int) -> tuple[int, ...] | None:
    """Equal layers in each of `number` virtual stages, as Megatron-Core cuts; where that does not go, with embedding
    and head counted as a layer each (its `account_for_embedding_in_pipeline_split` and `..loss..`); None if neither
    goes."""
    if layers % number == 0:
        return (layers // number,) * number
    if 2 < number <= layers + 2 and (layers + 2) % number == 0:
        each = (layers + 2) // number
        return (each - 1, *((each,) * (number - 2)), each - 1)
    return None


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
