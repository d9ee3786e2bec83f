"""Dispatch to experts elsewhere is `LocalDispatch` to all of them, in output and gradients, wherever tokens go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.schema import ModelConfig
from hpctrain.layout.layout import Layout
from hpctrain.layout.parameters import parameter_specs
from hpctrain.layout.placement import place
from hpctrain.model.moe import Experts, LocalDispatch, by_expert
from hpctrain.parallel.comm import all_reduce
from hpctrain.parallel.expert import ExpertDispatch, _order, _reordered
from hpctrain.parallel.mesh import build_mesh

EXPERTS, TOKENS, TOP = 4, 7, 2
MODEL = ModelConfig(layers=1, hidden=6, heads=2, moe=dict(experts=EXPERTS, top_k=TOP, ffn=8))  # type: ignore[arg-type]

CHOICES = {
    "any": lambda g: torch.rand(TOKENS, EXPERTS, generator=g).argsort(-1)[:, :TOP],
    "one has all": lambda g: torch.tensor([[2, 2]]).expand(TOKENS, TOP).clone(),
    "one has none": lambda g: torch.rand(TOKENS, EXPERTS - 1, generator=g).argsort(-1)[:, :TOP],
    "all dropped": lambda g: torch.full((TOKENS, TOP), EXPERTS),
    "some dropped": lambda g: torch.rand(TOKENS, EXPERTS + 1, generator=g).argsort(-1)[:, :TOP],
}
LAYOUTS = {
    "ep4": Layout(dp=4, ep=4),
    "ep2-edp2": Layout(dp=4, ep=2),
    "tp2-ep4": Layout(dp=2, tp=2, ep=4),
    "tp4-ep1": Layout(tp=4),
    "tp2-ep2-etp2": Layout(dp=2, tp=2, ep=2, etp=2),
    "tp4-etp4": Layout(tp=4, etp=4),
}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_experts() -> Experts:
    experts = Experts(MODEL).double()
    for i, p in enumerate(experts.parameters()):
        p.data = draw(90 + i, *p.shape)
    return experts


def through(dispatch: Any, experts: Experts, choice: str, data: int, rows: int | None) -> tuple[torch.Tensor, ...]:
    """Output and gradients of inputs and weights, for the tokens of data-parallel rank `data`; gradients of experts
    stay on them."""
    x, weights = draw(data, TOKENS, 6).requires_grad_(), draw(10 + data, TOKENS, TOP).requires_grad_()
    ids = CHOICES[choice](torch.Generator().manual_seed(20 + data))
    out = dispatch(x, ids, weights, experts, rows)
    out.backward(draw(30 + data, TOKENS, 6))
    assert x.grad is not None and weights.grad is not None
    return out.detach(), x.grad, weights.grad


def compared(layout: Layout, choice: str, rows: int | None) -> None:
    """On every rank: all it holds is what one process computes."""
    mesh = build_mesh(layout, torch.device("cpu"), timeout_s=60)
    alone, here = whole_experts(), whole_experts()
    wants = [through(LocalDispatch(EXPERTS), alone, choice, data, rows) for data in range(layout.dp)]
    windows = {}
    for name, p in list(here.named_parameters()):
        (spec,) = (s for s in parameter_specs(MODEL) if s.name == f"layers.0.moe.experts.{name}")
        (box,) = place(spec, MODEL, layout, mesh.rank).boxes
        windows[name] = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape))
        here.register_parameter(name, torch.nn.Parameter(p.detach()[windows[name]].clone()))
    dispatch = ExpertDispatch(mesh.tp, mesh.ep, mesh.etp, len(here.down))
    got = through(dispatch, here, choice, mesh.dp.index, rows)
    for mine, want in zip(got, wants[mesh.dp.index]):
        assert torch.allclose(mine, want, rtol=1e-12, atol=1e-12)
    for name, p in here.named_parameters():
        assert p.grad is not None, "a bucket waits for the gradient of an expert without tokens too"
        want = alone.get_parameter(name).grad
        assert want is not None
        assert torch.allclose(all_reduce(p.grad, mesh.edp), want[windows[name]], rtol=1e-12, atol=1e-12), name


def every_choice(layout: Layout) -> None:
    for choice in CHOICES:
        compared(layout, choice, None)
        if "has all" not in choice:
            compared(layout, choice, TOKENS)
    assert dist.get_world_size() == layout.world


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_is_the_local_dispatch_to_all(ranks: Any, layout: Layout) -> None:
    ranks(layout.world, every_choice, layout)


@given(
    ids=st.lists(st.lists(st.integers(0, EXPERTS), min_size=TOP, max_size=TOP), max_size=9),
    parts=st.integers(1, 3),
)
def test_no_choice_is_lost_and_every_permutation_has_its_inverse(ids: list[list[int]], parts: int) -> None:
    """Tokens of `parts` ranks, sorted there by expert, and again where they arrive."""
    shares = torch.tensor(ids, dtype=torch.int64).view(-1, TOP).chunk(parts)
    orders = [by_expert(share, EXPERTS) for share in shares]
    for share, (places, counts) in zip(shares, orders):
        taken = share.flatten()[places]
        assert sorted(places.tolist()) == [i for i, e in enumerate(share.flatten().tolist()) if e < EXPERTS]
        assert torch.equal(taken, taken.sort(stable=True).values) and counts.sum() == len(places)
    came = torch.cat([share.flatten()[places] for share, (places, _) in zip(shares, orders)])
    order = _order(torch.stack([counts for _, counts in orders]), len(came))
    if order is None:
        assert len(orders) == 1
        return
    rows = torch.arange(len(came))[:, None]
    assert torch.equal(came[order], came.sort(stable=True).values), "by expert, then by the rank they came from"
    assert torch.equal(_reordered(_reordered(rows, order, back=False), order, back=True), rows)
