"""`hpctrain data import|export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.data import PATH, data, report
from hpctrain.cli.data_build import progress, terminable

if TYPE_CHECKING:
    from hpctrain.data.foreign import Foreign
    from hpctrain.data.tokenizer import Tokenizer

KINDS = ("megatron", "numpy", "cerebras")


@data.command(
    "import", epilog="\b\nExample:  hpctrain data import corpora/web.h5 web_text_document --tokenizer gpt2.json"
)
@click.argument("output", metavar="OUT", type=PATH)
@click.argument("source", metavar="SOURCE", type=PATH)
@click.option("--format", "kind", type=click.Choice(KINDS), help="What SOURCE is, if its name does not say.")
@click.option("--tokenizer", type=PATH, help="The tokenizer.json that its ids were made with.")
@click.option("--vocab", type=click.IntRange(1), help="Number of ids, where no tokenizer.json is at hand.")
@click.option("--end", help="What ends a document: a token of the tokenizer.json, or with --vocab an id.")
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "uint16", "uint32", "int32", "int64"]),
    help="Type of ids in a raw .bin file; it is never guessed.",
)
@click.option("--documents", type=PATH, help="numpy: a .npy file of where documents begin, and the end.")
@click.option("--tokens", type=click.IntRange(1), help="How many tokens there must be, if that is known.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def import_(
    output: Path,
    source: Path,
    kind: str | None,
    tokenizer: Path | None,
    vocab: int | None,
    end: str | None,
    dtype: str | None,
    documents: Path | None,
    tokens: int | None,
    force: bool,
) -> None:
    """Write the corpus OUT from tokens that another tool wrote.

    SOURCE is the prefix of a .bin and .idx of Megatron-LM, a .npy or raw .bin file, or HDF5 of Cerebras' ModelZoo, a
    file or a folder. What was written is read again and compared with SOURCE by count and checksum.
    """
    from hpctrain.data.foreign import import_corpus

    chosen = _tokenizer(tokenizer, vocab, end)
    foreign = _read(source, kind or _kind(source), chosen, dtype, documents)
    with terminable(), progress(foreign.tokens, "importing") as advance:
        header, crc = import_corpus(foreign, output, chosen, expected=tokens, replace_existing=force, progress=advance)
    report(f"Imported {output}", header)
    click.echo(f"{source} and {output} have {header.tokens:,} tokens with CRC-32 {crc:08x} (as uint32)")


@data.command(epilog="\b\nExample:  hpctrain data export corpora/stdlib.h5 stdlib_text_document --format megatron")
@click.argument("path", metavar="FILE", type=PATH)
@click.argument("output", metavar="OUT", type=PATH)
@click.option("--format", "kind", type=click.Choice(["megatron", "numpy"]), required=True, help="What to write.")
@click.option("--force", is_flag=True, help="Replace what is there.")
def export(path: Path, output: Path, kind: str, force: bool) -> None:
    """Write the tokens of a corpus for another tool: OUT.bin and OUT.idx, or OUT.npy and OUT.documents.npy.

    A damaged corpus is refused. What was written is read again and compared by count and checksum.
    """
    from hpctrain.data.arrays import write_array
    from hpctrain.data.corpus import Corpus
    from hpctrain.data.megatron import write_megatron

    corpus = Corpus.open(path)
    with terminable():
        corpus.verify()
        files, crc = (write_megatron if kind == "megatron" else write_array)(corpus, output, force)
    written = " and ".join(map(str, files))
    click.echo(f"Wrote {written}: {corpus.header.tokens:,} tokens with CRC-32 {crc:08x} (as uint32)")
    if corpus.loss_mask is not None:
        click.echo("The loss mask of the corpus was left out: that format has none.")


def _tokenizer(path: Path | None, vocab: int | None, end: str | None) -> Tokenizer:
    from hpctrain.data.tokenizer import UnknownTokenizer, load_tokenizer
    from hpctrain.errors import DataError

    if path is not None and vocab is None:
        return load_tokenizer(path, end)
    if path is None and vocab is not None and end is not None and end.isdecimal() and int(end) < vocab:
        return UnknownTokenizer(vocab, int(end))
    raise DataError(
        "Ids have no meaning by themselves: give --tokenizer FILE, or --vocab N with --end ID, an id below N that ends "
        "a document."
    )


def _kind(source: Path) -> str:
    from hpctrain.errors import DataError

    if source.suffix == ".npy":
        return "numpy"
    if source.suffix in (".h5", ".hdf5") or source.is_dir():
        return "cerebras"
    if source.with_suffix(".idx").exists() or source.with_name(source.name + ".idx").exists():
        return "megatron"
    raise DataError(f"What {source} is cannot be told from its name; say --format {', '.join(KINDS)}.")


def _read(source: Path, kind: str, tokenizer: Tokenizer, dtype: str | None, documents: Path | None) -> Foreign:
    from hpctrain.data.arrays import read_array
    from hpctrain.data.cerebras import read_cerebras
    from hpctrain.data.megatron import read_megatron
    from hpctrain.errors import DataError

    if kind != "numpy" and (dtype is not None or documents is not None):
        raise DataError(f"--dtype and --documents are about numpy, and {source} is of {kind}; leave them out.")
    if kind == "megatron":
        return read_megatron(source)
    if kind == "cerebras":
        return read_cerebras(source)
    return read_array(source, tokenizer.end_of_document, dtype, documents)
