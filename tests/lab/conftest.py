"""Folders short enough for the sockets of a lab."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain import lab


@pytest.fixture
def home() -> Iterator[Path]:
    """A place for a lab that is taken down even if the test fails."""
    with tempfile.TemporaryDirectory(prefix="lab-") as made:
        yield Path(made) / "lab"
        lab.down(Path(made) / "lab")
