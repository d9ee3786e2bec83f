"""What of a chunk is gathered, let go and reduced together, and what is gathered ahead of what.

Units are the layers, in a layer with experts these apart, what turns tokens into hidden states, and what turns those
into logits. An embedding that is also the head of its chunk is the root's, which runs from the first to the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hpctrain.model.transformer import Transformer


@dataclass(frozen=True)
class Unit:
    """Parameters of modules, but for those in units inside.

    Attributes:
        name: for traces.
        modules: of one state; all run in every forward.
        experts: their state is that of experts.
        lookup: backward needs none of the weights.
        turn: backward begins with it where forward ended: its weights are kept in between.
        inside: a unit in it.
    """

    name: str
    modules: tuple[nn.Module, ...]
    experts: bool = False
    lookup: bool = False
    turn: bool = False
    inside: Unit | None = None

    @property
    def handle(self) -> FSDPModule:
        """What its settings are made through, once it is sharded."""
        module = self.modules[0]
        assert isinstance(module, FSDPModule), self.name
        return module


def units_of(chunk: Transformer, apart: bool) -> list[Unit]:
    """The units of a chunk in the order of forward, without those inside and without the root.

    Args:
        chunk: of the rank.
        apart: what tp cuts the vocabulary of has units of its own, because the parts are unequal. In which order a
            reduction adds may depend on the place in a buffer, and gradients of what ranks of tp hold alike are to
            stay equal bit for bit.
    """
    tied = shares_embedding(chunk)
    first = [("embedding", None if tied else chunk.embedding), ("positions", chunk.positions)]
    out = _ends(first, apart, lookup=True)
    for index, layer in chunk.numbered_layers():
        experts = None
        if layer.moe is not None:
            experts = Unit(f"layers.{index}.moe.experts", (layer.moe.experts,), experts=True)
        out.append(Unit(f"layers.{index}", (layer,), inside=experts))
    last = [("norm", chunk.norm), ("head", None if tied else chunk.head)]
    return out + _ends(last, apart, turn=True)


def shares_embedding(chunk: Transformer) -> bool:
    """Whether embedding and head of a chunk are one parameter, which is then the root's."""
    return chunk.model.tied and chunk.embedding is not None and chunk.head is not None


def _ends(
    modules: Sequence[tuple[str, nn.Module | None]], apart: bool, lookup: bool = False, turn: bool = False
) -> list[Unit]:
    """One unit of the modules that there are and that have parameters, or one of each."""
    there = [
        (name, module) for name, module in modules if module is not None and any(True for _ in module.parameters())
    ]
    if not apart and there:
        names, held = zip(*there)
        return [Unit("+".join(names), held, lookup=lookup, turn=turn)]
    return [Unit(name, (module,), lookup=lookup, turn=turn) for name, module in there]


def prefetch(units: Sequence[Unit], depth: int) -> None:
    """Have each unit gather so many ahead: forward what is inside it and the next ones, backward those before it.

    Backward it is called for every output of a unit, and some come after what is inside has let go: so that is
    gathered by the unit before. What is inside gathers nothing: where activations are computed again it runs forward
    in backward. With nothing to gather a unit names itself, lest FSDP2 guess from the forwards it has seen, which in a
    pipeline are of several micro-batches.
    """
    for at, unit in enumerate(units):
        ahead, behind = units[at + 1 :][:depth], [u for u in units[:at][::-1][:depth] if not u.lookup]
        unit.handle.set_modules_to_forward_prefetch(_forward(unit, ahead) if depth else [])
        unit.handle.set_modules_to_backward_prefetch([h for u in behind for h in _handles(u)] or [unit.handle])
        if unit.inside is not None:
            unit.inside.handle.set_modules_to_backward_prefetch([unit.inside.handle])


def _forward(unit: Unit, ahead: Sequence[Unit]) -> list[FSDPModule]:
    """What is inside a unit, and the next ones; what is inside the last of these that one gathers itself."""
    out = [handle for u in (unit, *ahead) for handle in _handles(u)][1:]
    return out[:-1] if ahead and ahead[-1].inside is not None else out


def _handles(unit: Unit) -> list[FSDPModule]:
    return [unit.handle] + ([unit.inside.handle] if unit.inside is not None else [])
