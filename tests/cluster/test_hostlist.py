"""Hostlists as scontrol has them: its frozen answers, and itself where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.hostlist import expand, fold, natural
from hpctrain.errors import ConfigError

FROZEN = json.loads((Path(__file__).parent / "data/hostlists.json").read_text())
"""Answers of scontrol 22.05."""


@pytest.mark.parametrize("text", FROZEN["hostnames"])
def test_expanded_as_scontrol_did(text: str) -> None:
    assert expand(text) == FROZEN["hostnames"][text]


@pytest.mark.parametrize("text", FROZEN["hostlist"])
def test_folded_as_scontrol_did(text: str) -> None:
    assert fold(text.split(",")) == FROZEN["hostlist"][text]
    assert fold(text.split(","), sort=True) == FROZEN["hostlistsorted"][text]


@pytest.mark.parametrize("text", [*FROZEN["refused"], "n[1", "n[1-2", "n]1[", "n1]", "n[ 1-2]", "n[+1-2]", "n[1-2]x[3"])
def test_refused_in_a_sentence(text: str) -> None:
    """What scontrol refuses, and what it makes nonsense of: `n[1` is `n]` to it."""
    with pytest.raises(ConfigError, match=r"^hostlist='.*; write names and ranges, such as n\[1-4,7\],login\.$"):
        expand(text)


def test_what_launchers_got_wrong() -> None:
    """Field failure 4: PyTorch Lightning #14896 took `linux[1` for the first host, and #1943 stumbled over dashes."""
    assert expand("linux[1-3,7]")[0] == "linux1"
    assert expand("gpu-node-[07-08],cpu-1")[:2] == ["gpu-node-07", "gpu-node-08"]


def test_empty_and_long() -> None:
    assert expand("") == [] and fold([]) == ""
    hosts = [f"n{i:05d}" for i in range(20000)]
    assert fold(reversed(hosts), sort=True) == "n[00000-19999]" and expand("n[00000-19999]") == hosts
    assert natural(["n10", "n9", "n1"]) == ["n1", "n9", "n10"]
    assert natural(["mlx5_10", "mlx5_bond_0", "mlx5_9"]) == ["mlx5_9", "mlx5_10", "mlx5_bond_0"]


@given(st.text("n[]1023-,x \n", max_size=12))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand(text)
    except ConfigError:
        return
    assert all(name and not set(name) & set("[], \n") for name in names)


NAME = st.lists(st.sampled_from(["n", "a", "x", "-", "1", "0", "2", "9", "10", "01", "b"]), min_size=1, max_size=5)
NAMES = st.lists(NAME.map("".join).filter(lambda name: name[0] != "-"), min_size=1, max_size=12)
NUMBER = st.tuples(st.integers(0, 12), st.integers(1, 3)).map(lambda n: str(n[0]).zfill(n[1]))
SPAN = st.one_of(NUMBER, st.tuples(NUMBER, NUMBER).map("-".join))
BRACKET = st.lists(SPAN, min_size=1, max_size=3).map(lambda spans: f"[{','.join(spans)}]")
PIECE = st.tuples(st.sampled_from(["n", "x-", "a", "3"]), BRACKET).map("".join)
LIST = st.lists(st.lists(PIECE, min_size=1, max_size=4).map("".join), min_size=1, max_size=3).map(",".join)


@given(NAMES)
def test_a_folded_list_expands_to_the_same(names: list[str]) -> None:
    assert expand(fold(names)) == names
    assert expand(fold(names, sort=True)) == natural(names)
    assert sorted(natural(names)) == sorted(names)


Ask = Callable[[str, str], "list[str] | None"]


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    if shutil.which("scontrol") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no scontrol here")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=localhost\n")

    def ask(what: str, value: str) -> list[str] | None:
        command = ["scontrol", "show", what, value]
        environment = {**os.environ, "SLURM_CONF": str(conf)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
        return done.stdout.splitlines() if not done.stderr else None

    if ask("hostnames", "n[1-2]") != ["n1", "n2"]:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("scontrol here does not answer")
    return ask


@given(NAMES, LIST)
@settings(max_examples=60, deadline=None)
def test_scontrol_says_the_same(scontrol: Ask, names: list[str], text: str) -> None:
    joined = ",".join(names)
    assert scontrol("hostlist", joined) == [fold(names)]
    assert scontrol("hostlistsorted", joined) == [fold(names, sort=True)]
    try:
        expanded = expand(text)
    except ConfigError:
        expanded = None
    assert scontrol("hostnames", text) == expanded
