"""What the pages in `docs` show is so: their commands, what they print, profiles, tables."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.config.load import load
from hpctrain.config.validate import validate
from hpctrain.launch.slurm.profile import Profile, site
from hpctrain.layout.schedule import SCHEDULES
from hpctrain.layout.schedule_claims import claimed_bubble, claimed_peak
from tests.test_readme import parse

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "slurm.md").read_text()
SCHEDULE_PAGE = (DOCS / "schedules.md").read_text()
PAGES = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
COMMANDS = [
    shlex.split(line)[1:]
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("hpctrain ")
]
SHOWN = re.findall(r"^```sh\nhpctrain ([^\n]*)\n```\n\n```text\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
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


@pytest.mark.parametrize(("line", "output"), SHOWN, ids=[line for line, _ in SHOWN])
def test_commands_print_what_is_shown(line: str, output: str) -> None:
    printed = CliRunner().invoke(main, line.split(), env={"COLUMNS": "80"}).stdout
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


def test_the_table_of_schedules_is_that_of_the_program() -> None:
    """Names, chunks, and the activations and idle time of 4 ranks and 8 micro-batches where a part takes 1."""
    sizes = {"p": 4, "m": 8, "F": 1, "I": 1, "W": 1}
    rows = re.findall(r"^\| `([\w-]+)` \| (\d)( or more)? \| ([^|]*) \| ([^|]*) \|", SCHEDULE_PAGE, re.MULTILINE)
    assert {name for name, *_ in rows} == set(SCHEDULES)
    for name, chunks, _, idle, kept in rows:
        known = {**sizes, "v": int(chunks)}
        claim = claimed_bubble(name, 4, int(chunks), 8)
        assert claim is not None
        idle_time, most = (eval(text.strip().replace(")(", ")*(").replace(")F", ")*F"), known) for text in (idle, kept))
        assert claim.share == pytest.approx(idle_time / (8 * 3 + idle_time))
        assert most == claimed_peak(name, 4, int(chunks), 8, 0) / int(chunks)


def test_traps_have_the_tests_that_the_page_names() -> None:
    rows = re.findall(r"^\| (D\d+): [^|]* \| `(\S+) (\w+)` \|", (DOCS / "numerics.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for trap, file, name in rows:
        test = (Path(__file__).parent / file).read_text().partition(f"def {name}(")[2]
        assert re.search(rf"\b{trap}\b", re.split(r"\n(?:def|@)", test)[0]), f"{file} {name} does not name {trap}"


def test_there_is_something_to_test() -> None:
    assert len(COMMANDS) > 14 and len(PROFILES) == 2 and len(SHOWN) == 4
