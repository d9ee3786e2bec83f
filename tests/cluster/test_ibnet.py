"""ibnetdiscover: rails and units of a real fabric, and what is no host or no leaf."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.ibnet import from_ibnetdiscover
from hpctrain.cluster.readfabric import fabric_in, read_fabric
from hpctrain.cluster.switches import units
from hpctrain.errors import ConfigError

DATA = Path(__file__).parent / "data/ibnetdiscover"
MANAGEMENT = {"B11-P1-CUFM-02", "ubuntu"}
CROSSED = {"b08-p1-dgx-08-c01"}
"""Its HCA-5 is on the leaf of rail 4 and its HCA-6 on that of rail 3."""


@pytest.fixture(scope="module")
def real() -> str:
    return (DATA / "topograph_example.out").read_text()


def test_rails_and_units_of_a_real_fabric() -> None:
    """120 hosts with the leaf of every rail as in the table made by hand, which takes rails from names of switches."""
    fabric = read_fabric(DATA / "topograph_example.out")
    want: dict[str, list[str]] = {}
    unit_of: dict[str, str] = {}
    for row in csv.DictReader((DATA / "topograph_example_truth.csv").open()):
        host = row["host"]
        if row["hca"].startswith(("HCA-", "mlx5_")) and host not in MANAGEMENT and "MT4129" not in host:
            want.setdefault(host, [""] * 4)[int(row["rail"]) - 1] = row["leaf"]
            unit_of[host] = row["scalable_unit"]
    assert len(want) == 120 and "localhost" in want
    assert fabric.leaves == {host: tuple(leaves) for host, leaves in want.items()}
    assert (fabric.kind, fabric.rails) == ("rails", 4)
    found = units(fabric.leaves)
    assert sorted(len(unit) for unit in found) == [11, 11, 14, 15, 16, 17, 18, 18]
    assert all(len({unit_of[host] for host in unit}) == 1 for unit in found)
    assert all("IBSPINE" in up for leaf in fabric.leaves["localhost"] if leaf for up in fabric.parents[leaf])
    assert not any("IBSPINE" in switch for switch in fabric.parents)


def test_what_is_said_of_it(real: str) -> None:
    said = " | ".join(from_ibnetdiscover(real).problems)
    assert "B11-P1-CUFM-02, ubuntu: all devices on leaves of other rails" in said
    assert "b08-p1-dgx-08-c01 HCA-5, b08-p1-dgx-08-c01 HCA-6: on the leaf of another rail" in said
    assert "69 ports of leaves carry no host's name" in said and "localhost" in said
    assert "rail 2: none of the 11 hosts around a05-p1-dgx-01-c01 has a port on it" in said


def test_a_crossed_and_a_pulled_cable(real: str) -> None:
    fabric = from_ibnetdiscover(real)
    assert fabric.leaves["b08-p1-dgx-08-c01"][2] == "B09-P1-IBLEAF-03-08"
    lines = [line for line in real.splitlines() if '"a07-p1-dgx-03-c05 HCA-2"' not in line]
    guid = next(line for line in real.splitlines() if '"a07-p1-dgx-03-c05 HCA-2"' in line and line[0] == "[")
    rest = "\n".join(line for line in lines if guid.split('"')[1] not in line)
    pulled = from_ibnetdiscover(rest)
    assert pulled.leaves["a07-p1-dgx-03-c05"][1] == "" and pulled.leaves["a07-p1-dgx-03-c05"][2]
    assert any("rail 1: a07-p1-dgx-03-c05 of the hosts around" in problem for problem in pulled.problems)


def test_a_chassis_and_three_levels() -> None:
    fabric = read_fabric(DATA / "superbench_ibnetdiscover.txt")
    assert (len(fabric.leaves), fabric.kind, fabric.rails, fabric.problems) == (10, "tree", 1, ())
    assert fabric.leaves["RMD701091902003"] == fabric.leaves["RMD701091902019"] == ("rmd70-0101-0919-03ib0",)
    assert fabric.parents["rmd70-0101-0919-03ib0"] == ("rmd70-0101-0908-01ib1-A/L01",)
    assert fabric.parents["rmd70-0101-0908-01ib1-A/L02"] == ("rmd70-0101-0908-01ib1-A/S01",)
    assert len(fabric.parents) == 7


@pytest.mark.parametrize("name", ["topograph_example-bad.out", "superbench_ibstat.txt"])
def test_what_holds_no_fabric_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^fabric='{name}'"):
        read_fabric(DATA / name)


def port(number: int, there: str, name: str) -> str:
    return f'[{number}]\t"{there}"[1](1) \t\t# "{name}" lid 1 4xNDR'


def test_two_devices_on_one_leaf_and_a_host_on_a_spine() -> None:
    text = ""
    for leaf in range(2):
        text += f'switchguid=0x{leaf}\nSwitch\t64 "S-{leaf}"\t\t# "MF0;leaf{leaf}:MQM/U1" enhanced port 0\n'
        for host in range(4):
            for device in range(2):
                text += port(8 * host + device, f"H-a{leaf}{host}{device}", f"n{leaf}{host} mlx5_{device}") + "\n"
        text += port(60, "S-f", "MF0;spine:MQM/U1") + "\n\n"
    text += 'Switch\t64 "S-f"\t\t# "MF0;spine:MQM/U1"\n'
    text += "\n".join(port(i + 1, f"S-{i}", f"MF0;leaf{i}:MQM/U1") for i in range(2)) + "\n"
    text += port(9, "H-ee", "ufm mlx5_0") + "\n"
    fabric = fabric_in(text, "x")
    assert fabric.leaves["n13"] == ("leaf1", "leaf1") and len(fabric.leaves) == 8 and fabric.kind == "tree"
    assert fabric.parents == {"leaf0": ("spine",), "leaf1": ("spine",)}
    assert any("ufm: on switches that are no leaves" in problem for problem in fabric.problems)


@pytest.mark.parametrize("damaged", ["(1]", "[x]", "1]", "Swtch", " [1]"])
def test_a_line_with_a_device_that_is_no_port_is_said(damaged: str) -> None:
    """Whatever became of its beginning: a device is named in it."""
    text = 'Switch 4 "S-01" # "leaf;l1" base\n[1] "H-0a"[1](0a) # "n1 mlx5_0"\n[2] "H-0b"[1](0b) # "n2 mlx5_0"\n'
    assert set(from_ibnetdiscover(text).leaves) == {"n1", "n2"} and not from_ibnetdiscover(text).problems
    found = from_ibnetdiscover(text.replace("[1]", damaged, 1))
    assert set(found.leaves) == {"n2"} and "line 2: not understood" in found.problems


def test_a_file_that_ends_early_gives_the_part_that_is_there(real: str) -> None:
    part = from_ibnetdiscover(real[: len(real) // 8 + 20])
    whole = from_ibnetdiscover(real)
    assert 20 < len(part.leaves) < 120
    told = [(mine, whole.leaves[host]) for host, mine in part.leaves.items() if host not in MANAGEMENT]
    assert all(set(filter(None, mine)) <= set(theirs) for mine, theirs in told)
    assert part.problems


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damage_gives_a_part_or_a_sentence(data: st.DataObject) -> None:
    text = (DATA / "superbench_ibnetdiscover.txt").read_text()
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(text)))
        drop = data.draw(st.sampled_from([1, 9, 200, len(text)]))
        text = text[:at] + data.draw(st.text(st.sampled_from('[]"()#SH-1 \n;:/'), max_size=4)) + text[at + drop :]
    try:
        fabric = fabric_in(text, "damaged")
    except ConfigError:
        return
    assert fabric.leaves and all(any(mine) for mine in fabric.leaves.values())
