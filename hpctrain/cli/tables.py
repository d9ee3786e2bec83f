"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from rich.console import Console

PIPED_WIDTH = 240
"""Columns where nobody says how wide the output may be: cells are not cut for a file."""


def whole_lines(stream: TextIO) -> Console:
    """A console without markup; into a pipe or a file it breaks no lines."""
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, soft_wrap=False)


def columns(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """The lines of a table, for people and pipes alike: names, then rows. Numbers stand right, None is empty."""
    cells = [[("" if value is None else str(value)) for value in row.values()] for row in rows]
    names = list(rows[0]) if rows else []
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    right = [all(c.isdigit() or not c for c in column) for column in zip(*cells)]
    for line in ([names, *cells]) if rows else []:
        parts = [c.rjust(width) if r else c.ljust(width) for c, width, r in zip(line, widths, right)]
        yield "  ".join(parts).rstrip()
