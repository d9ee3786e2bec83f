"""Site profiles: those of the package, those of a file, and what is refused in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.launch.slurm.profile import check_lead, check_time, limit_seconds, profiles, site

ROOT = Path(__file__).parents[3]

NAMES = ["aws-p4d", "aws-p5", "azure-ndv4", "azure-ndv5", "dgx-a100", "dgx-h100", "gb200-nvl72", "generic", "lab"]


def test_the_package_has_those_of_slurm_templates() -> None:
    assert list(profiles()) == NAMES
    assert {path.stem for path in (ROOT / "slurm_templates").glob("*.yaml")} == set(profiles())


@pytest.mark.parametrize("name", profiles())
def test_each_is_valid_and_finds_its_prologue(name: str) -> None:
    found = site(name)
    assert found.name == name and found.profile.about
    assert bool(found.prologue) == bool(found.profile.prologue)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_with_a_prologue_beside_it(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("module load cuda\n")
    found = site(write(tmp_path, "about: mine\nprologue: setup.sh\ntime: 1-0\nsbatch: {nice: 3, hold: true}\n"))
    assert found.prologue == "module load cuda\n"
    assert found.profile.sbatch == {"nice": 3, "hold": True} and found.profile.sbatch["hold"] is True
    assert found.profile.gpus == "gres"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("about: x\npartitoin: gpu\n", "partitoin: there is no such key, the nearest is partition"),
        ("partition: gpu\n", "about: it must be there"),
        ("about: x\ntime: tomorrow\n", "time: 'tomorrow' does not fit"),
        ("about: x\ntime: 30\n", r"time: 30 does not fit \(input should be a valid string\)"),
        ("about: x\npartition: two words\n", "partition: 'two words' does not fit"),
        ("about: x\nexclusive: 1\n", "exclusive: 1 does not fit"),
        ("about: x\nsbatch: {nodes: 4}\n", "nodes is not a profile's to set"),
        ("about: x\nsbatch: {no-requeue: true}\n", "no-requeue is not a profile's to set"),
        ("about: x\nsbatch: {wait: true, test-only: true}\n", "test-only, wait is not a profile's to set"),
        ("about: x\nsbatch: {clusters: b}\n", "clusters is not a profile's to set"),
        ("about: x\nsbatch: {Bad: 4}\n", "sbatch"),
        ("about: x\nenvironment: {1BAD: a}\n", "environment"),
        ("about: x\nenvironment: {A: 'b\n\n  c'}\n", "environment"),
        ("about: x\ncontainer: {kind: docker, image: y}\n", "container.kind: 'docker' does not fit"),
        ("about: x\nprologue: gone.sh\n", "gone.sh cannot be read: No such file"),
        ("- a\n", "it: "),
        ("about: [\n", "must be YAML, but"),
        ("about: a\nabout: b\n", "given twice"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        site(write(tmp_path, text))
    assert str(caught.value).startswith("cluster.profile=") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("generik", "there is no such profile; the nearest is generic"),
        ("frontier", "they are " + ", ".join(NAMES) + ", or name a file with .yaml"),
        ("/nowhere/x.yaml", "cannot be read: No such file"),
        ("x.yml", "cannot be read: No such file"),
    ],
)
def test_a_profile_that_is_not_there(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        site(name)


@pytest.mark.parametrize("time", ["90", "1:30", "01:30:00", "2-0", "2-12:30", "2-12:30:00", "UNLIMITED"])
def test_times_of_slurm(time: str) -> None:
    assert check_time(time) == time


@pytest.mark.parametrize("time", ["", "2h", "1:3", "1:2:3:4", "-5", "2-", "90\n", "1.5"])
def test_times_that_are_none(time: str) -> None:
    with pytest.raises(ConfigError, match=r"^--time=.*for example 90, 1:30:00 or 2-0\.$"):
        check_time(time)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:01", 7201), ("1-2", 93600), ("1-2:30", 95400), ("1-0:0:5", 86405), ("0", 0)],
)
def test_time_limits_as_sbatch_reads_them(text, seconds):
    assert limit_seconds(text) == seconds


def test_a_job_that_would_be_warned_as_it_begins_is_refused():
    profile = site("generic").profile
    for fine in (None, "3", "2:01", "UNLIMITED", "0"):
        check_lead(profile, fine)
    for short in ("2", "1:59", "0:30"):
        with pytest.raises(ConfigError, match=rf"--time='{short}': is \d+ s, and the profile has ranks warned 120 s"):
            check_lead(profile, short)
