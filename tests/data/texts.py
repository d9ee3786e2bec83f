"""Texts of words that are easy to read in a failure."""

import random

WORDS = [
    "corpus",
    "token",
    "rank",
    "node",
    "shard",
    "batch",
    "file",
    "order",
    "seed",
    "epoch",
    "window",
    "pack",
    "blend",
    "mask",
    "weight",
]


def text(seed):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 120)))
