"""`hpctrain data`: corpora are built and looked at here. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from hpctrain.data.format import Header
    from hpctrain.data.sources import Listing

LINE_EVERY_S = 5.0
"""Seconds between lines of progress where there is no terminal."""


@click.group()
def data() -> None:
    """Build HDF5 corpora from text, and look at them."""


@data.command(epilog="\b\nExample:  hpctrain data build corpora/code.h5 ~/src --suffix .py --suffix .md")
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("sources", metavar="SOURCE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option(
    "--suffix", "suffixes", multiple=True, help="Take only files in directories that end so; may be repeated."
)
@click.option(
    "--order",
    type=click.Choice(["hash", "path"]),
    default="hash",
    show_default=True,
    help="Order of documents: by a hash of their names, or as they are found.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def build(output: Path, sources: tuple[Path, ...], suffixes: tuple[str, ...], order: Any, force: bool) -> None:
    """Write the corpus OUT from text files and directories, one document a file.

    Tokens are bytes. Directories are searched whole; hidden files are left out, empty ones are counted.
    """
    from hpctrain.data.sources import list_sources

    listing = list_sources(sources, suffixes, order, output=output)
    header = _build(output, listing, sources, force, suffixes=list(suffixes), order=order)
    _report(f"Built {output}", header)


@data.command(epilog="\b\nExample:  hpctrain data stdlib corpora/stdlib.h5")
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUT if it is there and holds something else.")
def stdlib(output: Path, force: bool) -> None:
    """Write the corpus OUT from the source files of this Python's standard library.

    Real text of tens of MB that every machine has. If OUT holds just that already, it is left as it is.
    """
    from hpctrain.data.sources import list_sources

    source = Path(sysconfig.get_path("stdlib"))
    suffixes, excluded = (".py",), ("site-packages", "dist-packages", "__pycache__")
    listing = list_sources([source], suffixes, "hash", excluded, output)
    if (present := _same(output, listing)) is not None:
        _report(f"{output} is up to date", present)
        return
    header = _build(output, listing, (source,), force, suffixes=list(suffixes), order="hash")
    _report(f"Built {output}", header)


@data.command(epilog="\b\nExample:  hpctrain data info corpora/stdlib.h5 --verify")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read all of it and compare the checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: Path, verify: bool, as_json: bool) -> None:
    """Show what a corpus holds and where it comes from."""
    from hpctrain.data.corpus import Corpus

    corpus = Corpus.open(path)
    if verify:
        corpus.verify()
    if as_json:
        click.echo(
            json.dumps({**asdict(corpus.header), "dtype": corpus.header.dtype.name, "verified": verify}, indent=2)
        )
        return
    _report(f"{path}: {'verified' if verify else 'not verified (--verify reads all of it)'}", corpus.header)
    header = corpus.header
    rows = {
        "tokenizer": f"{header.tokenizer} (vocabulary {header.vocab}, end of document {header.end_of_document})",
        "stored as": header.dtype.name,
        "sha256": header.sha256,
        **{key.replace("_", " "): _plain(value) for key, value in header.provenance.items()},
    }
    for key, value in rows.items():
        click.echo(f"  {key:<16}{value}")


def _build(output: Path, listing: Listing, sources: tuple[Path, ...], force: bool, **provenance: Any) -> Header:
    from hpctrain.data.build import build

    with _terminable(), _progress(listing.bytes) as advance:
        return build(output, listing, sources, replace_existing=force, progress=advance, **provenance)


def _same(output: Path, listing: Listing) -> Header | None:
    """The header of `output` if it is a sound corpus of just these files."""
    from hpctrain.data.corpus import Corpus
    from hpctrain.data.tokenizer import ByteTokenizer
    from hpctrain.errors import DataError

    try:
        corpus = Corpus.open(output)
        if corpus.header.provenance.get("listing_sha256") != listing.sha256:
            return None
        if corpus.header.tokenizer_sha256 != ByteTokenizer.sha256:
            return None
        corpus.verify()
    except DataError:
        return None
    return corpus.header


def _report(title: str, header: Header) -> None:
    empty = header.provenance.get("empty_files", 0)
    click.echo(
        f"{title}: {header.documents:,} documents, {header.tokens:,} tokens, "
        f"unigram entropy {header.entropy:.3f} nats/token" + (f", {empty} empty files left out" if empty else "")
    )


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM leaves the block by an exception, so that nothing half-written stays behind."""

    def leave(number: int, frame: Any) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Progress over `total` bytes on stderr: a bar on a terminal, now and then a line elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total)
        return
    columns = (TextColumn("building"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)


def _lines(total: int) -> Callable[[int], None]:
    done, told = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, told
        done += size
        if time.monotonic() - told >= LINE_EVERY_S:
            told = time.monotonic()
            click.echo(f"building: {done:,} of {total:,} bytes", err=True)

    return advance
