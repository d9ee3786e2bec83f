"""`hpctrain data sample|check|stats`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.data import PATH, data
from hpctrain.cli.outputs import picture_file
from hpctrain.cli.tables import columns

if TYPE_CHECKING:
    from hpctrain.data.look import Stats

BAR = 40
"""Characters of the longest bar."""


@data.command(epilog="\b\nExample:  hpctrain data sample corpora/stdlib.h5 --seq 64 --count 2")
@click.argument("path", metavar="FILE", type=PATH)
@click.option("--document", type=click.IntRange(0), help="Show this document; by default samples of a run are shown.")
@click.option("--seq", type=click.IntRange(1), default=256, show_default=True, help="Tokens of a sample.")
@click.option(
    "--from", "first", type=click.IntRange(0), default=0, show_default=True, help="First global sample count."
)
@click.option("--count", type=click.IntRange(1), default=3, show_default=True, help="Samples to show.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="train.seed of the run.")
def sample(path: Path, document: int | None, seq: int, first: int, count: int, seed: int) -> None:
    """Show text of a corpus: a document, or samples in the order in which a run reads them."""
    import numpy as np

    from hpctrain.data.corpus import Corpus
    from hpctrain.data.look import text_of
    from hpctrain.data.order import shuffled
    from hpctrain.errors import DataError

    corpus = Corpus.open(path)
    if document is not None:
        if document >= corpus.header.documents:
            raise DataError(f"Corpus {path} has documents 0 to {corpus.header.documents - 1}, and no {document}.")
        click.echo(text_of(corpus, int(corpus.documents[document]), int(corpus.documents[document + 1])))
        return
    split = corpus.view(0, corpus.header.documents)
    for at, window in zip(
        range(first, first + count), shuffled(np.arange(first, first + count), split.samples(seq), seed)
    ):
        start = int(window) * seq
        owner, offset = split.place(start)
        click.echo(f"--- sample {at}: document {owner}, from its token {offset} on")
        click.echo(text_of(corpus, start, start + seq))


@data.command(epilog="\b\nExample:  hpctrain data check corpora/stdlib.h5")
@click.argument("paths", metavar="FILE...", type=PATH, nargs=-1, required=True)
def check(paths: tuple[Path, ...]) -> None:
    """Read corpora whole and compare them with their checksums; the first bad document of a damaged one is named."""
    from hpctrain.data.corpus import Corpus

    for path in paths:
        corpus = Corpus.open(path)
        corpus.verify()
        click.echo(f"{path}: sound, {corpus.header.documents:,} documents, {corpus.header.tokens:,} tokens")


@data.command(epilog="\b\nExample:  hpctrain data stats corpora/stdlib.h5 --seq 1024 --plot stdlib.png")
@click.argument("path", metavar="FILE", type=PATH)
@click.option("--seq", type=click.IntRange(1), default=2048, show_default=True, help="Tokens of a sample.")
@click.option("--plot", type=picture_file("--plot"), help="Draw lengths and frequencies of tokens into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stats(path: Path, seq: int, plot: Path | None, as_json: bool) -> None:
    """Show lengths of documents, frequencies of tokens, shares of sources, and what samples waste."""
    from hpctrain.data.corpus import Corpus
    from hpctrain.data.look import picture, waste
    from hpctrain.data.look import stats as count

    corpus = Corpus.open(path)
    found = count(corpus)
    costs = waste(corpus, seq)
    if plot is not None:
        picture(found, corpus, plot)
    if as_json:
        rows = [dict(zip(("from", "to", "documents", "tokens"), row)) for row in found.lengths]
        facts = {"lengths": rows, "median": found.median, "longest": found.longest, "unused_ids": found.unused}
        click.echo(json.dumps({**facts, "learnt": found.learnt, "shares": found.shares, "samples": costs}, indent=2))
        return
    click.echo(f"documents: median {found.median:,} tokens, longest {found.longest:,}")
    _histogram(found)
    click.echo(
        f"ids that do not occur: {found.unused:,} of {corpus.header.vocab:,}; learnt {found.learnt:.1%} of tokens"
    )
    frequent = sorted(range(len(found.counts)), key=lambda i: -found.counts[i])[:10]
    for line in columns(
        [
            {"id": i, "text": _shown(corpus, i), "share": f"{found.counts[i] / corpus.header.tokens:.2%}"}
            for i in frequent
        ]
    ):
        click.echo(f"  {line}")
    for name, tokens in found.shares.items():
        click.echo(f"source {name}: {tokens:,} tokens, {tokens / max(sum(found.shares.values()), 1):.1%}")
    for name, cost in costs.items():
        click.echo(
            f"samples of {seq} by {name}: {cost['samples']:,}, {cost['empty']:.2%} of places predict nothing, "
            f"{cost['cut']:.1%} of documents are cut, {cost['documents']:.1f} documents a sample"
        )


def _histogram(found: Stats) -> None:
    most = max(row[2] for row in found.lengths)
    for start, end, documents, _ in found.lengths:
        click.echo(f"  {start:>12,} to {end - 1:<12,} {documents:>12,}  {'#' * -(-documents * BAR // most)}")


def _shown(corpus: object, token: int) -> str:
    from hpctrain.data.corpus import Corpus
    from hpctrain.data.tokenizer import tokenizer_of
    from hpctrain.errors import DataError

    assert isinstance(corpus, Corpus)
    header = corpus.header
    if token == header.end_of_document:
        return "(end)"
    try:
        known = tokenizer_of(header.tokenizer, header.tokenizer_sha256, [corpus.tokenizer_json])
    except DataError:
        return ""
    return repr(known.decode([token]))
