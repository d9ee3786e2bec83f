"""Tokens a second of a recipe under tp=1 and tp=2 beside the plainest PyTorch loop of the same model.

All take turns, round after round (`benchmarks/rounds.py`), each rank with one thread; what is reported is the
median over rounds of the ratio within a round.

    python -m benchmarks.training [--recipe gpt-tiny] [--rounds 9] [--steps 6] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.ours import ours, random_tokens
from benchmarks.rounds import Contender, Work, race, rates, ratios, warm_up
from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig

IMPORTS = ("torch._dynamo", "hpctrain.train.loop", "hpctrain.sharding.none.engine")


def plain(config: RunConfig) -> Work:
    """A loop that anybody would write: nn.Linear, nn.LayerNorm, SDPA, AdamW."""
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
    inputs, labels = random_tokens(config)
    size = settings.micro_batch
    parts = list(zip(inputs.split(size), labels.split(size)))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, y in parts:
            loss = F.cross_entropy(model(x).reshape(-1, m.vocab), y.reshape(-1)) / len(parts)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return Work(step, float(sum(p.numel() for p in model.parameters())))


def measure(recipe: str, overrides: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Rates and ratios of all contenders, and rows for a table. Forks, as `race` does.

    Args:
        recipe: of a GPT-2.
        overrides: of its settings.
        rounds: in each of which all contenders have their turn.
        steps: of a turn.

    Raises:
        RuntimeError: one of them failed.
    """
    one, two = (load(recipe, [*overrides, f"parallel.tp={tp}"]) for tp in (1, 2))
    records = race(
        [
            Contender("plain", plain, (one,), world=0),
            Contender("tp=1", ours, (one, 1), world=1),
            Contender("tp=2", ours, (two, 2), world=2),
        ],
        rounds,
        steps,
    )
    if failed := [f"{name}: {record.error}" for name, record in records.items() if record.error is not None]:
        raise RuntimeError("\n".join(failed))
    ratio_of = {name: ratios(records, name, "plain") for name in records}
    rate = rates(records, one.train.global_batch * one.data.seq)
    ratio = {name: statistics.median(r) for name, r in ratio_of.items()}
    beside = f"plain PyTorch loop, one process: {rate['plain']:,.0f} tokens/s"
    return {
        "recipe": recipe,
        "overrides": list(overrides),
        "rounds": rounds,
        "tokens_per_second": rate,
        "ratio_to_plain": ratio,
        "ratio_spread": {name: [min(r), max(r)] for name, r in ratio_of.items()},
        "rows": [
            [f"train step of `{recipe}`, {name}", f"{rate[name]:,.0f} tokens/s", beside, f"{ratio[name]:.2f}"]
            for name in ("tp=1", "tp=2")
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
    warm_up(IMPORTS)
    print(json.dumps(measure(args.recipe, args.overrides, rounds, steps), indent=1))


if __name__ == "__main__":
    main()
