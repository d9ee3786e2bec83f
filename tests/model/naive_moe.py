"""A mixture of experts in loops over tokens, which shares nothing with ours but the parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from hpctrain.config.schema import MoeConfig


@dataclass
class Outcome:
    """What a layer makes of a batch."""

    out: Tensor
    loss: Tensor
    ids: list[list[list[int]]] = field(default_factory=list)
    """Of each sample and token the experts chosen, the best first, those that were full left out."""
    counts: list[int] = field(default_factory=list)
    """Of each expert the valid tokens that chose it."""
    dropped: int = 0
    aux: float = 0.0
    z: float = 0.0


def best(scores: list[float], number: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:number]


def chosen(scores: list[float], moe: MoeConfig) -> list[int]:
    size = len(scores) // moe.groups
    sums = [sum(sorted(scores[g * size : (g + 1) * size])[-2:]) for g in range(moe.groups)]
    kept = best(sums, moe.top_groups)
    return best([s if i // size in kept else -math.inf for i, s in enumerate(scores)], moe.top_k)


def mlp(x: Tensor, parameters: dict[str, Tensor], activation: str) -> Tensor:
    inner = parameters["up"] @ x
    inner = F.silu(parameters["gate"] @ x) * inner if activation == "swiglu" else F.gelu(inner)
    return parameters["down"] @ inner


def naive(
    x: Tensor, valid: Tensor, parameters: dict[str, Tensor], bias: list[float], moe: MoeConfig, activation: str
) -> Outcome:
    """Of `x` [batch, seq, hidden] and parameters by their names in `MoE`."""
    found = Outcome(torch.zeros_like(x), torch.zeros((), dtype=x.dtype), counts=[0] * moe.experts)
    rows = []
    for sample, counts in zip(x, valid.tolist()):
        taken, share, probability = [0] * moe.experts, [0] * moe.experts, torch.zeros(moe.experts, dtype=x.dtype)
        z = torch.zeros((), dtype=x.dtype)
        found.ids.append([])
        for token, counted in zip(sample, counts):
            logits = parameters["router.weight"] @ token
            powers = logits.exp()
            scores = powers / powers.sum() if moe.router == "softmax" else 1 / (1 + 1 / powers)
            ids = chosen([s + b for s, b in zip(scores.tolist(), bias)], moe)
            weights = torch.stack([scores[i] for i in ids])
            weights = moe.scale * (weights / weights.sum() if moe.normalize else weights)
            row = torch.zeros_like(token)
            found.ids[-1].append([])
            for i, weight in zip(ids, weights):
                found.counts[i] += counted
                if moe.capacity is not None and taken[i] >= moe.capacity * len(sample) * moe.top_k / moe.experts:
                    found.dropped += counted
                    continue
                taken[i] += 1
                found.ids[-1][-1].append(i)
                own = {n.removeprefix("experts."): p[i] for n, p in parameters.items() if n.startswith("experts.")}
                row = row + weight * mlp(token, own, activation)
            if moe.shared_ffn:
                names = {"gate": "shared.inputs.gate", "up": "shared.inputs.up", "down": "shared.down"}
                own = {n: parameters[f"{p}.weight"] for n, p in names.items() if f"{p}.weight" in parameters}
                row = row + mlp(token, own, activation)
            rows.append(row)
            if counted:
                probability = probability + scores / scores.sum()
                z = z + powers.sum().log() ** 2
                for i in best(scores.tolist(), moe.top_k):
                    share[i] += 1
        number = sum(counts)
        if number:
            f = torch.tensor([moe.experts / (moe.top_k * number) * s for s in share], dtype=x.dtype)
            aux = number * (f * probability / number).sum()
            found.loss = found.loss + moe.aux_loss * aux + moe.z_loss * z
            found.aux, found.z = found.aux + aux.item(), found.z + z.item()
    found.out = torch.stack(rows).view_as(x)
    return found
