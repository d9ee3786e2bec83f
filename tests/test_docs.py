"""What the pages in `docs/` show is so: their commands, and of `docs/slurm.md` its profiles and its table of keys."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.config.validate import validate
from hpctrain.launch.profile import Profile, site
from tests.test_readme import parse

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "slurm.md").read_text()
COMMANDS = [
    shlex.split(line)[1:]
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("hpctrain ")
]
PROFILES = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_parse(arguments: list[str]) -> None:
    parse(arguments)


@pytest.mark.parametrize("arguments", [a for a in COMMANDS if a[0] == "train"], ids=" ".join)
def test_trainings_could_start(arguments: list[str]) -> None:
    config = load(arguments[1], arguments[2:])
    validate(config, config.cluster.nodes * config.cluster.gpus_per_node)


@pytest.mark.parametrize("index", range(len(PROFILES)))
def test_profiles_are_valid(index: int, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(PROFILES[index])
    (tmp_path / "a100.sh").write_text("true\n")
    site(str(tmp_path / "shown.yaml"))


def test_every_key_of_a_profile_is_in_the_table() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", TEXT.partition("| key | meaning |")[2], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(Profile.model_fields)


def test_there_is_something_to_test() -> None:
    assert len(COMMANDS) > 10 and len(PROFILES) == 2
