"""Rows of text in columns, for people and for pipes alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def columns(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """The lines of a table: names, then rows. Numbers stand right, what is None is empty."""
    cells = [[("" if value is None else str(value)) for value in row.values()] for row in rows]
    names = list(rows[0]) if rows else []
    widths = [max(map(len, column)) for column in zip(names, *cells)]
    right = [all(c.isdigit() or not c for c in column) for column in zip(*cells)]
    for line in ([names, *cells]) if rows else []:
        parts = [c.rjust(width) if r else c.ljust(width) for c, width, r in zip(line, widths, right)]
        yield "  ".join(parts).rstrip()
