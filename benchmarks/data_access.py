"""Sample access: a corpus beside a numpy memmap of the same tokens in a plain .bin file, and chunked, compressed HDF5.

Every reader returns what a step needs, tokens and labels as int64 torch tensors of a batch of random windows,
from the page cache, in one process. Readers take turns in one run, in an order drawn anew for each round, so
that what else the machine does falls on all of them; ratios are medians over rounds.

    python -m benchmarks.data_access [--seq 2048] [--batch 32]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpctrain.data.batches import Batches
from hpctrain.data.build import build
from hpctrain.data.corpus import Corpus
from hpctrain.data.sources import list_sources
from hpctrain.model.batch import IGNORED

OURS, MASKED = "hpctrain", "hpctrain, document masks"
BY_SAMPLE, BY_BATCH = "numpy memmap, sample by sample", "numpy memmap, batch by batch"
BY_BATCH_MASKED = "numpy memmap, batch by batch, the same masks"
CHUNKED = "h5py, gzip in chunks of a sample"

Reader = Callable[[int], object]
"""Reads the n-th batch."""


def make_corpus(folder: Path, tokens: int) -> Corpus:
    """A corpus of random documents of 50 to 1500 tokens."""
    rng, size, texts = np.random.default_rng(0), 0, folder / "texts"
    texts.mkdir()
    while size < tokens:
        length = int(rng.integers(50, 1500))
        (texts / f"{size}.txt").write_bytes(rng.bytes(length))
        size += length + 1
    build(folder / "corpus.h5", list_sources([texts]), [texts])
    return Corpus.open(folder / "corpus.h5")


def memmap_by_sample(path: Path, seq: int, batch: int) -> Reader:
    """The way of most small trainers: a slice, a cast and a tensor for each sample, then a stack."""
    data = np.memmap(path, "<u2", "r")
    order = np.random.default_rng(1).permutation((len(data) - 1) // seq) * seq

    def read(n: int) -> object:
        starts = [order[i % len(order)] for i in range(n * batch, (n + 1) * batch)]
        x = torch.stack([torch.from_numpy(data[i : i + seq].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + seq].astype(np.int64)) for i in starts])
        return x, y

    return read


def memmap_by_batch(path: Path, seq: int, batch: int, end: int | None = None) -> Reader:
    """The fastest use of a memmap known: a stored permutation, all windows of a batch in one operation.

    With `end`, the id that ends a document, the batch has what ours has: labels that do not cross boundaries, and the
    number of each token's document; found from the ids, as trainers do that have no offsets.
    """
    data = np.asarray(np.memmap(path, "<u2", "r"))
    n_windows = (len(data) - 1) // seq
    windows = np.lib.stride_tricks.as_strided(data, (n_windows, seq + 1), (seq * 2, 2))
    order = np.random.default_rng(1).permutation(n_windows)

    def read(n: int) -> object:
        rows = windows[order[np.arange(n * batch, (n + 1) * batch) % n_windows]]
        tokens, labels = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if end is None:
            return torch.from_numpy(tokens), torch.from_numpy(labels)
        return tuple(map(torch.from_numpy, (tokens, labels, masked(rows, labels, end))))

    return read


def masked(rows: np.ndarray, labels: np.ndarray, end: int) -> np.ndarray:
    """Number of the document of each token; labels that cross a boundary are ignored, in place."""
    ends = rows[:, :-1] == end
    labels[ends] = IGNORED
    documents = np.zeros(labels.shape, np.int32)
    np.cumsum(ends[:, :-1], 1, np.int32, documents[:, 1:])
    return documents


def chunked(path: Path, tokens: np.ndarray, seq: int, batch: int) -> Reader:
    """Samples in a compressed HDF5 dataset whose chunks are whole samples, read one by one in random order."""
    n = (len(tokens) - 1) // seq
    rows = np.lib.stride_tricks.as_strided(tokens, (n, seq + 1), (seq * 2, 2))
    with h5py.File(path, "w") as file:
        file.create_dataset("input_ids", data=rows, chunks=(1, seq + 1), compression="gzip")
    data = h5py.File(path, "r")["input_ids"]
    order = np.random.default_rng(1).permutation(n)

    def read(at: int) -> object:
        found = np.stack([data[order[i % n]] for i in range(at * batch, (at + 1) * batch)])
        return torch.from_numpy(found[:, :-1].astype(np.int64)), torch.from_numpy(found[:, 1:].astype(np.int64))

    return read


def ours(corpus: Corpus, seq: int, batch: int, document_mask: bool) -> Reader:
    """Order without stored permutation; with `document_mask` also documents and their labels."""
    batches = Batches(corpus.split(0)[0], seq, seed=1, global_batch=batch, document_mask=document_mask)
    return lambda n: batches.batch(n * batch)


def turns(readers: dict[str, Reader], batches: int, rounds: int) -> dict[str, list[float]]:
    """Seconds for `batches` batches, by reader and round."""
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    rng = np.random.default_rng(2)
    for r in range(-1, rounds):  # round -1 warms up
        for name in rng.permutation(list(readers)):
            start = time.perf_counter()
            for n in range(batches):
                readers[name]((r + 1) * batches + n)
            if r >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(seq: int, batch: int, tokens: int, batches: int, rounds: int) -> dict[str, Any]:
    """Rates, ratios and rows for a table.

    Args:
        seq: tokens of a sample.
        batch: samples of a batch.
        tokens: of the corpus.
        batches: in a round.
        rounds: that count.
    """
    with tempfile.TemporaryDirectory() as name:
        corpus, plain = make_corpus(Path(name), tokens), Path(name, "plain.bin")
        corpus.tokens.tofile(plain)
        readers = {
            OURS: ours(corpus, seq, batch, False),
            MASKED: ours(corpus, seq, batch, True),
            BY_BATCH_MASKED: memmap_by_batch(plain, seq, batch, corpus.header.end_of_document),
            BY_SAMPLE: memmap_by_sample(plain, seq, batch),
            BY_BATCH: memmap_by_batch(plain, seq, batch),
            CHUNKED: chunked(Path(name, "chunked.h5"), np.asarray(corpus.tokens), seq, batch),
        }
        seconds = turns(readers, batches, rounds)
    rate = {name: batch * batches / statistics.median(s) for name, s in seconds.items()}
    over = {
        name: {peer: statistics.median(p / s for p, s in zip(seconds[peer], seconds[name])) for peer in peers}
        for name, peers in ((OURS, (BY_SAMPLE, BY_BATCH, CHUNKED)), (MASKED, (BY_BATCH_MASKED,)))
    }
    what = f"samples of {seq} tokens in batches of {batch}"
    return {
        "what": "batches of random windows to int64 tensors, page cache, one process",
        "seq": seq,
        "batch": batch,
        "tokens": tokens,
        "batches": batches,
        "rounds": rounds,
        "samples_per_s": {name: round(r) for name, r in rate.items()},
        "speed_over": {name: {peer: round(r, 3) for peer, r in ratios.items()} for name, ratios in over.items()},
        "rows": [
            [
                what + (", with document masks" if name == MASKED else ""),
                f"{rate[name]:,.0f} samples/s",
                f"{peer}: {rate[peer]:,.0f} samples/s",
                f"{ratio:.2f}",
            ]
            for name, ratios in over.items()
            for peer, ratio in ratios.items()
        ],
    }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--batches", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 10 batches, 1M tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokens, batches, rounds = (1_000_000, 10, 3) if args.quick else (args.tokens, args.batches, args.rounds)
    print(json.dumps(measure(args.seq, args.batch, tokens, batches, rounds), indent=1))


if __name__ == "__main__":
    main()
