"""Tables for people."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console

PIPED_WIDTH = 240
"""Columns where nobody says how wide the output may be: cells are not cut for a file."""


def whole_lines(stream: TextIO) -> Console:
    """A console without markup; into a pipe or a file it breaks no lines."""
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, soft_wrap=False)
