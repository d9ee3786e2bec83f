"""gres.conf: records of real files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.gres import GresConf, mismatches, read_gres

DATA = Path(__file__).parent / "data/gres_conf"


def read(name: str) -> GresConf:
    return read_gres((DATA / name).read_text())


@pytest.mark.parametrize(
    "name, counts, cores",
    [
        ("schedmd_test7.17.1_gres.conf", [4, 4], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("schedmd_test7.17.2_gres.conf", [4, 4], [tuple(range(8)), tuple(range(8, 16))]),
        ("schedmd_test7.17.3_gres.conf", [1] * 8, [tuple(range(8))] * 4 + [tuple(range(8, 16))] * 4),
        ("schedmd_test7.17.4_gres.conf", [4, 4], [(), ()]),
        ("schedmd_test7.17.6_gres.conf", [4, 4], [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("schedmd_test7.17.7_gres.conf", [4, 4], [tuple(range(10001)), (4, 5, 6, 7)]),
        ("schedmd_gresguide_01.txt", [1, 1], [tuple(range(16)), tuple(range(16, 32))]),
    ],
)
def test_real_files(name: str, counts: list[int], cores: list[tuple[int, ...]]) -> None:
    conf = read(name)
    assert [one.count for one in conf.lines] == counts and [one.cores for one in conf.lines] == cores
    assert conf.problems == () and {one.name for one in conf.lines} == {"gpu"}


def test_examples_of_the_manual() -> None:
    conf = read("schedmd_manpage_examples.conf")
    assert sum(one.name == "gpu" for one in conf.lines) == 9 and len(conf.lines) == 16
    assert [one.files for one in conf.of("tux3")] == [
        ("/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia3"),
        tuple(f"/dev/nvidia{i}" for i in range(4)),
    ]
    assert conf.autodetect("tux9") == "rsmi" and conf.autodetect("tux3") == "nvml" and conf.autodetect("x") == "nvml"
    bandwidth = conf.of("tux7", "bandwidth")[0]
    assert (bandwidth.count, bandwidth.flags, bandwidth.type) == (4 << 30, ("CountOnly",), "lustre")
    assert [(one.count, one.cores) for one in conf.of("tux7", "mps")] == [(100, (0, 1)), (100, (2, 3))]
    assert any("not of a gres.conf" in problem for problem in conf.problems)


@pytest.mark.parametrize("name, left_out", [("deepops_gres.conf", 7), ("oci_gres.conf.j2", 4)])
def test_templates_are_no_files(name: str, left_out: int) -> None:
    conf = read(name)
    assert len([p for p in conf.problems if "left out" in p]) >= left_out
    assert all("{" not in value for one in conf.lines for value in (*one.files, *one.nodes))


def test_links_and_counts() -> None:
    conf = read_gres("NodeName=n[1-2] Name=gpu Count=2 File=/dev/nvidia0 Links=-1,16 CPUs=0-1\nName=nic Count=x")
    one = conf.of("n2")[0]
    assert (one.count, one.links, one.cores) == (2, (-1, 16), (0, 1)) and conf.of("n3") == ()
    assert [p.split(": ")[1] for p in conf.problems] == ["Count=2 and 1 files", "Count=x is no number"]


def test_mismatches() -> None:
    conf = read("schedmd_test7.17.2_gres.conf")
    near = [(0, 16)] * 4 + [(8, 24)] * 4
    assert mismatches(conf, "any", 8, near) == []
    assert mismatches(conf, "any", 4) == ["gres.conf gives any 8 GPUs, and it has 4"]
    assert "other GPUs of any near" in mismatches(conf, "any", 8, near[::2] * 2)[0]
    assert mismatches(read_gres("AutoDetect=nvml"), "any", 8) == []


@given(st.text(st.sampled_from('Name=gpu File=/dev/x[0-3]\n Cores=,#"{%Links Count K\\'), max_size=80))
@settings(max_examples=100, deadline=None)
def test_any_text_is_read(text: str) -> None:
    conf = read_gres("Name=gpu " + text)
    assert isinstance(conf.problems, tuple)
