"""Commands whose ranks are forked."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.comms.result import Result
from tests.comms.runs import run


@pytest.fixture
def forked(ranks, monkeypatch: pytest.MonkeyPatch):
    """`forked(*arguments)`: a command in this process, whose ranks are forked and not started anew."""

    def run_here(spec, count: int, folder: Path) -> Result:
        found = Result.of(ranks(count, run, spec.plain())[0])
        folder.mkdir(parents=True)
        found.write(folder)
        return found

    monkeypatch.setattr("hpctrain.comms.local.run_here", run_here)
    return lambda *arguments: CliRunner().invoke(main, ["bench", *arguments])
