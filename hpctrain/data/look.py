"""Looking at a corpus: whether it is sound, how long its documents are, which tokens it has, what packing costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.corpus import Corpus
from hpctrain.data.packing import pack
from hpctrain.files import write_picture

BLOCK = 1 << 22
"""Tokens counted at a time."""


@dataclass(frozen=True, eq=False)
class Stats:
    """What a corpus is made of.

    Attributes:
        lengths: (from, to, documents, tokens) for lengths in [from, to), which doubles from one to the next.
        median, longest: lengths in tokens.
        counts: [vocab] how often each id is in it.
        learnt: share of the tokens that is not only read.
        shares: tokens by source on the command line that built it, duplicates counted; empty if not known.
    """

    lengths: list[tuple[int, int, int, int]]
    median: int
    longest: int
    counts: NDArray[np.int64]
    learnt: float
    shares: dict[str, int]

    @property
    def unused(self) -> int:
        """Ids that it does not have."""
        return int((self.counts == 0).sum())


def stats(corpus: Corpus) -> Stats:
    """Count everything once.

    Raises:
        DataError: there are ids that the vocabulary does not have.
    """
    counts = np.zeros(corpus.header.vocab, np.int64)
    for at in range(0, corpus.header.tokens, BLOCK):
        found = np.bincount(corpus.tokens[at : at + BLOCK], minlength=len(counts))
        if len(found) > len(counts):
            corpus.verify()  # which names the document
        counts += found
    lengths = np.diff(corpus.documents)
    power = np.frexp(lengths.astype(np.float64))[1] - 1
    rows = [
        (1 << int(p), 2 << int(p), int((power == p).sum()), int(lengths[power == p].sum())) for p in np.unique(power)
    ]
    learnt = 1.0 if corpus.loss_mask is None else float(np.count_nonzero(corpus.loss_mask) / corpus.header.tokens)
    return Stats(rows, int(np.median(lengths)), int(lengths.max()), counts, learnt, shares(corpus))


def shares(corpus: Corpus) -> dict[str, int]:
    """Tokens by source, as the build counted them."""
    named, found = corpus.header.provenance.get("sources"), corpus.header.provenance.get("shares")
    if not isinstance(named, list) or not isinstance(found, dict):
        return {}
    names = {str(n): str(name) for n, name in enumerate(named)}
    return {names.get(n, f"source {n}"): tokens for n, tokens in found.items() if isinstance(tokens, int)}


def waste(corpus: Corpus, seq: int) -> dict[str, dict[str, Any]]:
    """What samples of `seq` tokens cost, as windows and packed.

    Of each: samples; `empty`, the share of places without a token to predict; `cut`, the share of documents that are in
    more than one sample; `boundaries`, the documents of a sample on average.
    """
    offsets, n = corpus.documents, corpus.header.documents
    out = {}
    if (windows := (corpus.header.tokens - 1) // seq) > 0:
        read = windows * seq
        inside = int(offsets.searchsorted(read, "left"))  # documents that begin in what is read
        first, last = offsets[:-1] // seq, (offsets[1:] - 1) // seq
        ends = int((offsets[1:] <= read).sum())  # an end of document predicts nothing
        out["windows"] = {
            "samples": windows,
            "empty": ends / read,
            "cut": float((first != last).mean()),
            "documents": (inside + windows) / windows,
        }
    packing = pack(offsets, seq)
    if packing.samples:
        out["best_fit"] = {
            "samples": packing.samples,
            "empty": packing.waste,
            "cut": packing.cut / n,
            "documents": len(packing.start) / packing.samples,
        }
    return out


def picture(found: Stats, corpus: Corpus, output: Path) -> None:
    """Draw lengths of documents and frequencies of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    try:
        edges = [row[0] for row in found.lengths]
        left.bar(range(len(edges)), [row[3] / corpus.header.tokens for row in found.lengths])
        left.set_xticks(range(len(edges)), [f"{e:,}" for e in edges], rotation=60)
        left.set(xlabel="length of the document, tokens (from)", ylabel="share of all tokens")
        frequent = np.sort(found.counts[found.counts > 0])[::-1]
        right.loglog(np.arange(1, len(frequent) + 1), frequent)
        right.set(xlabel="rank of the token", ylabel="times it occurs")
        figure.suptitle(f"{corpus.path.name}: {corpus.header.documents:,} documents, {corpus.header.tokens:,} tokens")
        figure.tight_layout()
        write_picture(output, figure)
    finally:
        pyplot.close(figure)


def text_of(corpus: Corpus, start: int, end: int) -> str:
    """The text of a stretch of a corpus."""
    from hpctrain.data.tokenizer import tokenizer_of

    header = corpus.header
    tokenizer = tokenizer_of(header.tokenizer, header.tokenizer_sha256, [corpus.tokenizer_json])
    return tokenizer.decode(corpus.tokens[start:end].tolist())
