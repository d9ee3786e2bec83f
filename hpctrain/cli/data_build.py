"""`hpctrain data build|stdlib|tokenizer`: corpora and tokenizers are made here."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hpctrain.cli.data import PATH, data, report

if TYPE_CHECKING:
    from hpctrain.data.format import Header
    from hpctrain.data.sources import Listing
    from hpctrain.data.team import Team

LINE_EVERY_S = 5.0
"""Seconds between lines of progress where there is no terminal."""
SMALL = 2 << 20
"""Bytes of sources up to which one process is enough, where nobody says how many."""
STDIN = Path("-")


def sourced(command: Callable[..., None]) -> Callable[..., None]:
    """Arguments and options about what is read."""
    for add in (
        click.argument("sources", metavar="SOURCE...", type=PATH, nargs=-1, required=True),
        click.option(
            "--suffix", "suffixes", multiple=True, help="Take only files in directories that end so; may be repeated."
        ),
        click.option(
            "--format",
            "kind",
            type=click.Choice(["text", "jsonl", "parquet"]),
            help="What all files are; by default their names say (.jsonl, .ndjson, .parquet, else text).",
        ),
        click.option("--field", default="text", show_default=True, help="Field of a record that has the text."),
        click.option(
            "--skip-bad", is_flag=True, help="Leave out and count records and files that are bad; else they stop it."
        ),
    ):
        command = add(command)
    return command


@data.command(epilog="\b\nExample:  hpctrain data build corpora/code.h5 ~/src --suffix .py --suffix .md")
@click.argument("output", metavar="OUT", type=PATH)
@sourced
@click.option(
    "--order",
    type=click.Choice(["hash", "path"]),
    default="hash",
    show_default=True,
    help="Order of documents: by a hash of their names, or as they are found.",
)
@click.option("--tokenizer", type=PATH, help="A tokenizer.json; by default tokens are bytes.")
@click.option("--end", help="Its token that ends a document, if that cannot be told from its name.")
@click.option("--prompt", metavar="FIELD", help="Field of a record with what comes before the text and is not learnt.")
@click.option("--unique", is_flag=True, help="Leave out documents whose text was there before.")
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes; default one a CPU, one for small sources.")
@click.option("--mpi", is_flag=True, help="Build on all ranks of this MPI job; each takes its share.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def build(
    output: Path,
    sources: tuple[Path, ...],
    suffixes: tuple[str, ...],
    kind: Any,
    field: str,
    skip_bad: bool,
    order: Any,
    tokenizer: Path | None,
    end: str | None,
    prompt: str | None,
    unique: bool,
    workers: int | None,
    mpi: bool,
    force: bool,
) -> None:
    """Write the corpus OUT from text, JSON lines and Parquet: files, directories, or - for what is piped in.

    A file of text becomes a document, and so does each record of the others. Files may end in .gz or .zst.
    Directories are searched whole; hidden files are left out, empty ones are counted. A build that was killed
    goes on where it was when the same command is given again.
    """
    from hpctrain.data.records import Reading
    from hpctrain.data.team import team
    from hpctrain.data.tokenizer import load_tokenizer

    members = team(mpi)
    chosen = load_tokenizer(tokenizer, end)
    with spooled(output, sources, kind, force, members) as paths:
        listing = members.first(lambda: _listing(paths, suffixes, kind, order, output))
        header = _build(
            output,
            listing,
            sources,
            quiet=members.rank > 0,
            ranks=members.size,
            tokenizer=chosen,
            end=end,
            reading=Reading(field, prompt, skip_bad),
            unique=unique,
            workers=workers or (len(os.sched_getaffinity(0)) if listing.bytes > SMALL else 1),
            team=members,
            replace_existing=force,
            suffixes=list(suffixes),
            order=order,
        )
    if members.rank == 0:
        report(f"Built {output}", header)


@data.command(epilog="\b\nExample:  hpctrain data stdlib corpora/stdlib.h5")
@click.argument("output", metavar="OUT", type=PATH)
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
        report(f"{output} is up to date", present)
        return
    header = _build(output, listing, (source,), replace_existing=force, suffixes=list(suffixes), order="hash")
    report(f"Built {output}", header)


@data.group()
def tokenizer() -> None:
    """Make tokenizers."""


@tokenizer.command(
    epilog="\b\nExample:  hpctrain data tokenizer train corpora/code.json ~/src --suffix .py --vocab 8192"
)
@click.argument("output", metavar="OUT", type=PATH)
@sourced
@click.option("--vocab", type=click.IntRange(1), default=32768, show_default=True, help="Number of ids.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def train(
    output: Path,
    sources: tuple[Path, ...],
    suffixes: tuple[str, ...],
    kind: Any,
    field: str,
    skip_bad: bool,
    vocab: int,
    force: bool,
) -> None:
    """Write the tokenizer.json OUT: byte-level BPE, trained on text. The same text gives the same file."""
    from hpctrain.data.bpe import save, train_bpe
    from hpctrain.data.output import check_output
    from hpctrain.data.records import Piece, Reading, chunks
    from hpctrain.data.team import Team

    check_output(output, force)
    with spooled(output, sources, kind, force, Team()) as paths:
        listing = _listing(paths, suffixes, kind, "path", output)
        reading = Reading(field, skip=skip_bad, text=True)
        with terminable(), progress(listing.bytes, "reading") as advance:
            found = (c for s in listing.sources for c in chunks(Piece(s, 0, s.size), reading, advance))
            made = train_bpe((c.text for c in found if not c.bad), vocab)
    save(made, output, force)
    fewer = "" if made.vocab == vocab else f" of the {vocab:,} wanted, for the text has no more pairs to join"
    click.echo(f"Trained {output}: {made.vocab:,} ids{fewer}; {made.end_of_document} ends a document")


def _listing(paths: tuple[Path, ...], suffixes: tuple[str, ...], kind: Any, order: Any, output: Path) -> Listing:
    from hpctrain.data.sources import list_sources

    return list_sources(paths, suffixes, order, output=output, kind=kind)


@contextmanager
def spooled(
    output: Path, sources: tuple[Path, ...], kind: str | None, force: bool, team: Team
) -> Iterator[tuple[Path, ...]]:
    """The sources, with a file in the place of what is piped in."""
    from hpctrain.data.output import check_output
    from hpctrain.data.spool import spool
    from hpctrain.data.workplace import folder_of
    from hpctrain.errors import DataError

    if STDIN not in sources:
        yield sources
        return
    if sources.count(STDIN) > 1:
        raise DataError("Source - is named twice, and can be read once; name it once.")
    if not folder_of(output).exists():  # else a build that was killed goes on, and looks at the output itself
        team.first(lambda: check_output(output, force))
    name = f"stdin{'.jsonl' if kind == 'jsonl' else ''}"
    with terminable(), spool(output, name, sys.stdin.buffer if sys.stdin else None, team) as file:
        yield tuple(file if source == STDIN else source for source in sources)


def _build(
    output: Path, listing: Listing, sources: tuple[Path, ...], quiet: bool = False, ranks: int = 1, **how: Any
) -> Header:
    from hpctrain.data.build import build

    with terminable(), nullcontext(lambda done: None) if quiet else progress(listing.bytes // ranks) as advance:
        return build(output, listing, sources, progress=advance, **how)


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


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM leaves the block by an exception, so that nothing half-written stays behind."""

    def leave(number: int, frame: Any) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(total: int, what: str = "building") -> Iterator[Callable[[int], None]]:
    """Progress over `total` bytes on stderr: a bar on a terminal, now and then a line elsewhere.

    The bar, which has a thread, begins when there is something to show, so that workers can be forked before.
    """
    if not sys.stderr.isatty():
        yield lines(total, what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("", total=total)

    def advance(done: int) -> None:
        bar.start()  # nothing, if it has
        bar.advance(task, done)

    try:
        yield advance
    finally:
        bar.stop()


def lines(total: int, what: str) -> Callable[[int], None]:
    """Progress in lines: how much, how fast, how long it will still take."""
    done, began = 0, time.monotonic()
    told = began

    def advance(size: int) -> None:
        nonlocal done, told
        done += size
        now = time.monotonic()
        if now - told >= LINE_EVERY_S:
            told = now
            rate = done / (now - began)
            left = max(total - done, 0) / rate
            click.echo(f"{what}: {done:,} of {total:,} bytes, {rate / 1e6:,.1f} MB/s, {left:,.0f} s left", err=True)

    return advance
