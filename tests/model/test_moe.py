"""Router and experts against loops over tokens, and what must hold of any routing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config.schema import ModelConfig, MoeConfig
from hpctrain.model.grouped import ALIGNED, grouped_linear, kernel_linear, room_for, slots_of
from hpctrain.model.moe import LocalDispatch, MoE, by_expert
from hpctrain.model.router import Capacity, Load
from hpctrain.parallel.keeper import recompute
from tests.model.naive_moe import naive

BASE: dict[str, Any] = dict(experts=6, top_k=2, ffn=7, aux_loss=0.3, z_loss=0.05)
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "one": dict(top_k=1, normalize=False),
    "all": dict(top_k=6),
    "most get none": dict(experts=40, top_k=3),
    "sigmoid": dict(router="sigmoid", scale=2.5, shared_ffn=5),
    "groups": dict(router="sigmoid", groups=3, top_groups=2, top_k=3),
    "groups of one": dict(groups=6, top_groups=4),
    "bias": dict(router="sigmoid", bias_rate=0.1, normalize=False),
    "drop": dict(capacity=0.7, shared_ffn=3),
    "pad": dict(capacity=1.3, overflow="pad", router="sigmoid", bias_rate=0.1),
    "gelu": dict(activation="gelu", shared_ffn=4),
}


def layer(seed: int = 0, activation: str = "swiglu", **moe: Any) -> MoE:
    """In float64, with weights that route unevenly."""
    model = ModelConfig(hidden=5, heads=1, activation=activation, moe=MoeConfig(**{**BASE, **moe}))
    made = MoE(model).double()
    generator = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    if model.moe is not None and model.moe.bias_rate is not None:
        made.router.bias = torch.linspace(-1.0, 1.0, model.moe.experts)
    return made


def inputs(batch: int = 3, seq: int = 9, hidden: int = 5) -> tuple[Tensor, Tensor]:
    """Hidden states, and which count: none of the first sample, all of the last."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batch, seq, hidden, generator=generator, dtype=torch.float64)
    share = torch.linspace(0, 1, batch)[:, None]
    return x, torch.rand(batch, seq, generator=generator) < share


@pytest.mark.parametrize("case", CASES)
def test_equals_loops_over_tokens(case: str) -> None:
    made, (x, valid) = layer(**CASES[case]), inputs()
    x.requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bias = made.router.bias.tolist() if made.router.bias is not None else [0.0] * made.router.moe.experts
    own = dict(made.named_parameters())
    want = naive(x, valid, own, bias, made.router.moe, made.experts.activation)
    gradients = torch.autograd.grad((want.out * direction).sum() + want.loss, [x, *own.values()])
    out, loss = made(x, [4, 5, 6], valid)
    assert loss is not None
    ids = made.router(x, [4, 5, 6], valid).ids
    got = [[[i for i in token if i < len(bias)] for token in sample] for sample in ids.tolist()]
    assert got == want.ids and sum(want.counts) == made.router.moe.top_k * int(valid.sum())
    torch.testing.assert_close(out, want.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, want.loss, rtol=1e-12, atol=1e-12)
    mine = torch.autograd.grad((out * direction).sum() + loss, [x, *own.values()])
    for name, a, b in zip(("x", *own), mine, gradients):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    total = made.router.tally.total()
    assert total is not None
    load = Load.of(total)
    assert load.experts.tolist() == want.counts and load.dropped == want.dropped and load.tokens == valid.sum()
    assert load.aux.item() == pytest.approx(want.aux) and load.z.item() == pytest.approx(want.z)
    assert want.dropped > 0 or made.router.moe.capacity is None


@pytest.mark.parametrize("case", ["sigmoid", "pad"])
def test_gradients_are_those_of_small_differences(case: str) -> None:
    made, (x, valid) = layer(**CASES[case]), inputs(2, 4)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        own = dict(zip(dict(made.named_parameters()), parameters))
        out, loss = torch.func.functional_call(made, own, (x, [0, 1], valid))
        return torch.cat([out.flatten(), loss[None]])

    leaves = [t.detach().clone().requires_grad_() for t in (x, *made.parameters())]
    assert torch.autograd.gradcheck(function, leaves)


def test_tokens_that_do_not_count_change_no_loss_and_no_load() -> None:
    made, (x, valid) = layer(capacity=2.0), inputs()
    other = torch.where(valid[..., None], x, 3 * x.flip(0))
    (_, loss), counted = made(x, [0, 1, 2], valid), made.router.tally.total()
    assert counted is not None
    made.router.tally.clear()
    (_, same), again = made(other, [0, 1, 2], valid), made.router.tally.total()
    assert torch.equal(loss, same) and torch.equal(counted[:6], again[:6])


def test_a_batch_is_its_samples() -> None:
    """Losses, capacity and counts of samples together and one by one. Trap D13: a balance loss is no sum over parts."""
    made, (x, valid) = layer(capacity=0.6), inputs()
    (out, loss), whole = made(x, [0, 1, 2], valid), made.router.tally.total()
    made.router.tally.clear()
    parts = [made(x[i : i + 1], [i], valid[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(torch.cat([p[0] for p in parts]), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(p[1] for p in parts), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(made.router.tally.total(), whole, rtol=1e-12, atol=1e-12)


def test_counted_again_it_is_the_same() -> None:
    """Trap D15: what a recomputed forward counts is counted once."""
    made, (x, valid) = layer(), inputs()
    x.requires_grad_()
    out, loss = recompute(made.forward, x, [0, 1, 2], valid)
    once = made.router.tally.total()
    assert loss is not None and once is not None
    (out.sum() + loss).backward()
    assert torch.equal(once, made.router.tally.total())


def test_evaluation_counts_nothing() -> None:
    made, (x, valid) = layer().eval(), inputs()
    out, loss = made(x, [], None)
    assert loss is None and made.router.tally.total() is None
    torch.testing.assert_close(out, made.train()(x, [0, 1, 2], valid)[0], rtol=0, atol=0)


@pytest.mark.parametrize("again", [False, True])
def test_of_equal_experts_the_first_is_chosen(again: bool) -> None:
    """Trap D16. All scores equal, and two pairs of equal rows; a recomputed forward routes as the first one did."""
    made, (x, valid) = layer(), inputs()
    made.router.weight.data.zero_()
    assert (made.router(x, [0, 1, 2], valid).ids == torch.tensor([0, 1])).all()
    made.router.weight.data[[5, 4]] = torch.randn(5, dtype=torch.float64)
    made.router.weight.data[[3, 1]] = torch.randn(5, dtype=torch.float64)
    seen: list[Tensor] = []
    made.router.register_forward_hook(lambda *a: seen.append(a[-1].ids))
    x.requires_grad_()
    out, loss = recompute(made.forward, x, [0, 1, 2], valid) if again else made(x, [0, 1, 2], valid)
    (out.sum() + loss).backward()
    assert len(seen) == 1 + again and all(torch.equal(ids, seen[0]) for ids in seen)
    for first, second in seen[0].flatten(0, 1).tolist():
        assert (first, second) in ((4, 5), (1, 3)) or {first, second} & {0, 2}


def test_scores_of_a_bf16_model_are_those_of_a_wide_router() -> None:
    """Trap D17. The same experts as in float64; in bf16 a part of the tokens would go elsewhere."""
    model = ModelConfig(hidden=64, heads=1, moe=MoeConfig(**{**BASE, "experts": 64, "top_k": 4}))
    router = MoE(model).router
    router.weight.data = 0.02 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    router.bfloat16()
    x = torch.randn(4, 200, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids, weights, loss = router(x, [0, 1, 2, 3], None)
    assert weights.dtype == torch.float32 and loss.dtype == torch.float32
    wide = (x.double() @ router.weight.double().T).sort(dim=-1, descending=True).indices[..., :4]
    narrow = (x @ router.weight.T).sort(dim=-1, descending=True, stable=True).indices[..., :4]
    assert torch.equal(ids, wide) and not torch.equal(narrow, wide)


def test_gradients_of_an_expert_without_tokens_and_of_one_with_all() -> None:
    made, (x, valid) = layer(top_k=1, router="sigmoid", bias_rate=0.0), inputs()
    made.router.bias = torch.tensor([0.0, 0, 9, 0, 0, 0])
    out, _ = made(x, [0, 1, 2], valid)
    out.sum().backward()
    for name in ("gate", "up", "down"):
        grad = made.experts.get_parameter(name).grad
        assert grad is not None and grad[2].any() and not grad[[0, 1, 3, 4, 5]].any()


class Echo(nn.Module):
    """Experts that give back what they take, and keep how much each had."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        self.counts = counts.tolist()
        assert sum(self.counts) == len(x)
        return x


ROUTINGS = st.tuples(st.integers(1, 7), st.integers(1, 12), st.integers(0, 2**32 - 1)).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.integers(1, sizes[0]))
)


def routing(experts: int, tokens: int, seed: int, top_k: int, none: bool) -> Tensor:
    """Different experts for each token, and where asked for no expert in the place of some."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, experts) if none else ids


@given(ROUTINGS, st.booleans())
@settings(max_examples=60)
def test_every_choice_is_in_one_row_of_its_expert(drawn: Any, none: bool) -> None:
    (experts, tokens, seed), top_k = drawn
    ids = routing(experts, tokens, seed, top_k, none)
    places, counts = by_expert(ids, experts)
    flat = ids.flatten()
    assert sorted(places.tolist()) == [i for i, e in enumerate(flat.tolist()) if e < experts]
    assert counts.tolist() == [int((flat == e).sum()) for e in range(experts)]
    assert flat[places].tolist() == sorted(flat[flat < experts].tolist())
    for rows in places.split(counts.tolist()):
        assert rows.tolist() == sorted(rows.tolist()), "tokens of an expert keep their order"


@given(ROUTINGS, st.booleans(), st.integers(0, 3))
@settings(max_examples=60)
def test_there_and_back_is_the_identity(drawn: Any, none: bool, spare: int) -> None:
    """With weights that sum to 1, through experts that change nothing; padded or not. What is dropped is missing."""
    (experts, tokens, seed), top_k = drawn
    ids = routing(experts, tokens, seed, top_k, none)
    x = torch.randn(tokens, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weights = torch.rand(tokens, top_k, dtype=torch.float64).add(0.1)
    weights /= weights.sum(-1, keepdim=True)
    left = (weights * (ids < experts)).sum(-1, keepdim=True)
    most = max(int(torch.bincount(ids.flatten(), minlength=experts + 1)[:experts].max()), 1)
    for rows in (None, most + spare):
        echo = Echo()
        out = LocalDispatch(experts)(x, ids, weights, echo, rows)
        torch.testing.assert_close(out, left * x, rtol=1e-12, atol=1e-12)
        assert rows is None or echo.counts == [rows] * experts


@given(st.integers(1, 9), st.integers(1, 20), st.integers(1, 5), st.floats(0.05, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_an_expert_takes_the_first_tokens_up_to_its_capacity(
    experts: int, seq: int, top_k: int, factor: float, seed: int
) -> None:
    top_k = min(top_k, experts)
    capacity = Capacity(MoeConfig(experts=experts, top_k=top_k, capacity=factor))
    ids = torch.stack([routing(experts, seq, seed + i, top_k, False) for i in range(2)])
    taken, rows = capacity(ids), capacity.moe.room(seq)
    assert rows == math.ceil(factor * seq * top_k / experts)
    for sample, of_sample in zip(ids, taken):
        for expert in range(experts):
            places = [t for t in range(seq) if expert in sample[t].tolist()]
            first = [t for t in places if bool((of_sample[t] & (sample[t] == expert)).any())]
            assert first == places[:rows]


def test_a_capacity_takes_no_memory_for_every_expert() -> None:
    """A table of choices by experts would be most of a router's memory."""
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            made = out if isinstance(out, (tuple, list)) else [out]
            largest[0] = max([largest[0], *(t.numel() for t in made if isinstance(t, Tensor))])
            return out

    ids = torch.stack([routing(64, 40, seed, 4, False) for seed in range(2)])
    with Watch():
        Capacity(MoeConfig(experts=64, top_k=4, capacity=1.0))(ids)
    assert largest[0] == ids.numel()


@given(st.lists(st.integers(0, 19), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_the_kernel_computes_what_the_loop_does(sizes: list[int], seed: int) -> None:
    """With groups padded to what it takes; in float32, as on a CPU there is that."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(sizes)
    x, weight = torch.randn(sum(sizes), 8, generator=generator), torch.randn(len(sizes), 16, 8, generator=generator)
    room, total = room_for(counts, sum(sizes))
    assert (room >= counts).all() and not (room % ALIGNED).any() and room.sum() == total
    slots = slots_of(counts, room, len(x))
    padded = x.new_zeros(total, 8).index_put((slots,), x)
    got = kernel_linear(padded, weight, room.cumsum(0).int())[slots]
    torch.testing.assert_close(got, grouped_linear(x, weight, sizes))
