"""`hpctrain data`: the group, and what a corpus says about itself. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.groups import Group

if TYPE_CHECKING:
    from hpctrain.data.format import Header


PATH = click.Path(path_type=Path, readable=False)
"""Whether it can be read is found by what reads it, and said in one sentence."""


@click.group(cls=Group)
def data() -> None:
    """Build HDF5 corpora from text, and look at them."""


@data.command(epilog="\b\nExample:  hpctrain data info corpora/stdlib.h5 --verify")
@click.argument("path", metavar="FILE", type=PATH)
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
    report(f"{path}: {'verified' if verify else 'not verified (--verify reads all of it)'}", corpus.header)
    header = corpus.header
    rows = {
        "tokenizer": f"{header.tokenizer} (vocabulary {header.vocab}, end of document {header.end_of_document})",
        "stored as": header.dtype.name,
        "sha256": header.sha256,
        **{key.replace("_", " "): _plain(value) for key, value in header.provenance.items()},
    }
    for key, value in rows.items():
        click.echo(f"  {key:<16}{value}")


def report(title: str, header: Header) -> None:
    """Say in one line what a corpus holds."""
    counted = {
        "empty_files": "empty files",
        "empty_records": "empty records",
        "bad_records": "bad records",
        "duplicates": "duplicates",
    }
    left_out = [f"{n:,} {counted[key]}" for key, n in header.provenance.items() if key in counted and n]
    click.echo(
        f"{title}: {header.documents:,} documents, {header.tokens:,} tokens, "
        f"unigram entropy {header.entropy:.3f} nats/token"
        + (f", {' and '.join(left_out)} left out" if left_out else "")
    )


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


from hpctrain.cli import data_build as _build  # noqa: E402, F401  (their commands join the group)
from hpctrain.cli import data_exchange as _exchange  # noqa: E402, F401
from hpctrain.cli import data_look as _look  # noqa: E402, F401
