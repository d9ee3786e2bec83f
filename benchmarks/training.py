"""Tokens a second of a recipe under tp=1 and tp=2 beside the plainest PyTorch loop of the same model.

All are timed in turn, round after round, in forked processes of one thread each, so that a change in the
machine's speed meets all of them; what is reported is the median over rounds of the ratio within a round.

    python -m benchmarks.training [--recipe gpt-tiny] [--rounds 9] [--steps 6] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.launch.zygote import Zygote

IMPORTS = ("torch._dynamo", "hpctrain.train.loop", "hpctrain.sharding.none.engine")


def plain(config: RunConfig, steps: int) -> float:
    """Tokens a second of a loop that anybody would write: nn.Linear, nn.LayerNorm, SDPA, AdamW."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    m, settings = config.model, config.train
    assert (m.norm, m.position, m.activation, m.kv, m.bias, m.tied) == (
        "layernorm", "learned", "gelu", m.heads, True, True,
    ), "the plain loop is a GPT-2"  # fmt: skip

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(m.hidden), nn.LayerNorm(m.hidden)
            self.qkv, self.out = nn.Linear(m.hidden, 3 * m.hidden), nn.Linear(m.hidden, m.hidden)
            self.up, self.down = nn.Linear(m.hidden, m.ffn_width), nn.Linear(m.ffn_width, m.hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, h = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, m.heads, h // m.heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(m.vocab, m.hidden), nn.Embedding(m.max_seq, m.hidden)
            self.blocks = nn.Sequential(*(Block() for _ in range(m.layers)))
            self.norm = nn.LayerNorm(m.hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
            return F.linear(self.norm(self.blocks(x)), self.tokens.weight)

    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, m.vocab, (settings.global_batch, config.data.seq + 1))

    def step() -> None:
        optimizer.zero_grad()
        parts = tokens.split(settings.micro_batch)
        for part in parts:
            logits = model(part[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, m.vocab), part[:, 1:].reshape(-1))
            (loss / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return _rate(step, steps, settings.global_batch * config.data.seq)


def ours(config: RunConfig, world: int, steps: int) -> float:
    """Tokens a second of the driver's own step, on `world` ranks."""
    import torch

    from hpctrain.layout.layout import Layout
    from hpctrain.layout.placement import replica_groups
    from hpctrain.model.batch import Batch
    from hpctrain.parallel.comm import barrier
    from hpctrain.parallel.mesh import build_mesh
    from hpctrain.parallel.parallelize import build_model
    from hpctrain.parallel.pipeline import Pipeline
    from hpctrain.sharding.build import build_engine
    from hpctrain.train.loop import train_step

    layout = Layout.of(config.parallel, world)
    mesh = build_mesh(layout, torch.device("cpu"), replica_groups(config.model, layout))
    model, records = build_model(config, mesh)
    engine = build_engine([model], records, mesh, config)
    pipeline = Pipeline(engine, mesh, config)
    size = config.train.global_batch // layout.dp
    tokens = torch.randint(0, config.model.vocab, (size, config.data.seq + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, torch.arange(size))

    def step() -> None:
        train_step(config, pipeline, engine, batch, 1e-3)
        barrier(mesh.world)

    return _rate(step, steps, config.train.global_batch * config.data.seq)


def _rate(step: Callable[[], None], steps: int, tokens: int) -> float:
    step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return tokens / statistics.median(times)


def measure(zygote: Zygote, recipe: str, overrides: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Rates and ratios of all contenders, and rows for a table.

    Args:
        zygote: forks the ranks.
        recipe: of a GPT-2.
        overrides: of its settings.
        rounds: in each of which all contenders have their turn.
        steps: timed in a turn.
    """
    one, two = (load(recipe, [*overrides, f"parallel.tp={tp}"]) for tp in (1, 2))
    contenders = {
        "plain": (plain, 0, (one, steps)),
        "tp=1": (ours, 1, (one, 1, steps)),
        "tp=2": (ours, 2, (two, 2, steps)),
    }
    names = list(contenders)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % 3 :] + names[: turn % 3]:
            function, world, args = contenders[name]
            rates[name].append(min(zygote.run(function, world, *args, timeout_s=600.0)))
    ratios = {name: [a / b for a, b in zip(rates[name], rates["plain"])] for name in names}
    rate = {name: statistics.median(r) for name, r in rates.items()}
    ratio = {name: statistics.median(r) for name, r in ratios.items()}
    beside = f"plain PyTorch loop, one process: {rate['plain']:,.0f} tokens/s"
    return {
        "recipe": recipe,
        "overrides": list(overrides),
        "rounds": rounds,
        "tokens_per_second": rate,
        "ratio_to_plain": ratio,
        "ratio_spread": {name: [min(r), max(r)] for name, r in ratios.items()},
        "rows": [
            [f"train step of `{recipe}`, {name}", f"{rate[name]:,.0f} tokens/s", beside, f"{ratio[name]:.2f}"]
            for name in names[1:]
        ],
    }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--recipe", default="gpt-tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 2 steps")
    args = parser.parse_args()
    rounds, steps = (2, 2) if args.quick else (args.rounds, args.steps)
    zygote = Zygote(IMPORTS)
    try:
        print(json.dumps(measure(zygote, args.recipe, args.overrides, rounds, steps), indent=1))
    finally:
        zygote.close()


if __name__ == "__main__":
    main()
