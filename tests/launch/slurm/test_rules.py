"""Flags by version and topology plugin of Slurm."""

from __future__ import annotations

import pytest

from hpctrain.errors import ConfigError
from hpctrain.launch.slurm.rules import Plugin, Slurm, Version, Wanted, directives, found, own_order, segment

VERSIONS: list[Version] = [(22, 5), (23, 2), (23, 11), (24, 5), (24, 11), (25, 5), (25, 11), (26, 5)]


def flags(version: Version | None, plugin: Plugin, **wanted: object) -> tuple[str, ...]:
    made = directives(Slurm(version, plugin), Wanted(**wanted))  # type: ignore[arg-type]
    return (*made.sbatch, *made.srun)


@pytest.mark.parametrize("version", VERSIONS)
def test_cpus_of_a_task_are_said_to_srun_too(version: Version) -> None:
    """Field failure 2: 22.05 and 23.02 do not hand them on."""
    assert "--cpus-per-task=12" in flags(version, "tree", cpus_per_task=12)
    assert not any("cpus-per-task" in flag for flag in flags(version, "tree"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("plugin", ["tree", "block", "flat"])
def test_every_rank_on_its_node_where_slurm_takes_it(version: Version, plugin: Plugin) -> None:
    made = directives(Slurm(version, plugin), Wanted(arbitrary=True))
    if version >= (26, 5) and plugin == "block":
        assert made.srun == ("--distribution=block:block",)
        assert made.left_out == (
            "--distribution=arbitrary is left out: Slurm 26.05 with topology/block refuses it, so ranks keep the order "
            "of Slurm, which follows blocks there",
        )
    else:
        assert made.srun == ("--distribution=arbitrary",) and made.left_out == ()
    assert directives(Slurm(version, plugin), Wanted()).srun == ("--distribution=block:block",)


@pytest.mark.parametrize("version", VERSIONS)
def test_segments(version: Version) -> None:
    assert ("segment=9" in flags(version, "block", nodes=36, segment=9)) == (version >= (24, 5))
    assert flags(version, "tree", nodes=36, segment=9) == ("--distribution=block:block",)
    with pytest.raises(
        ConfigError, match=r"^segment=5: must divide the 36 nodes of the job; use one of \[1, 2, 3, 4, 6"
    ):
        flags(version, "block", nodes=36, segment=5)


def test_a_segment_by_itself_is_the_largest_that_divides() -> None:
    assert [segment(n) for n in (1, 7, 18, 36, 37, 40, 1024)] == [1, 7, 18, 18, 1, 10, 16]
    assert "segment=10" in flags((25, 5), "block", nodes=40, segment="auto")
    assert flags((25, 5), "block", nodes=37, segment="auto") == ("--distribution=block:block",), "37 is prime"


@pytest.mark.parametrize(("plugin", "there"), [("tree", True), ("", True), ("block", False), ("flat", False)])
def test_switches_are_of_trees(plugin: Plugin, there: bool) -> None:
    made = directives(Slurm((24, 5), plugin), Wanted(switches="1@10:00"))
    assert made.sbatch == ("switches=1@10:00",) * there
    assert bool(made.left_out) != there


def test_what_is_not_known_is_taken_to_be_new() -> None:
    assert "segment=4" in flags(None, "", nodes=8, segment=4)
    assert "--distribution=arbitrary" in flags(None, "", arbitrary=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_tasks_that_are_given_gpus_of_their_own(version: Version) -> None:
    """Field failure 3: peers are hidden, unless Slurm can share them."""
    made = directives(Slurm(version, "tree"), Wanted(srun_args=("--gpus-per-task=1",)))
    assert ("--gres-flags=allow-task-sharing" in made.srun) == (version >= (24, 5))
    assert any("NVLink between ranks is lost" in said for said in made.left_out) == (version < (24, 5))


def test_what_older_versions_get_wrong_is_said() -> None:
    args = ("--gpu-bind=verbose,single:1", "--tres-bind=gres/gpu:map:3,2")
    said = directives(Slurm((22, 5), "tree"), Wanted(srun_args=args)).left_out
    assert any("before 23.02" in s for s in said) and any("before 24.11" in s for s in said)
    assert not any("before" in s for s in directives(Slurm((24, 11), "tree"), Wanted(srun_args=args)).left_out)


@pytest.mark.parametrize(
    ("version", "plugin", "params", "scheduler", "order"),
    [
        ((22, 5), "tree", "SwitchAsNodeRank", "", "by name"),
        ((23, 2), "tree", "SwitchAsNodeRank", "", "by topology"),
        ((24, 5), "tree", "", "", "by name"),
        ((26, 5), "tree", "", "", "by topology"),
        ((26, 5), "tree", "", "CR_NO_DIST_TOPO_BLOCK", "by name"),
        ((24, 11), "block", "", "", "by topology"),
        ((25, 5), "block", "BlockAsNodeRank", "", "by name"),
        ((25, 11), "block", "BlockAsNodeRank", "", "by topology"),
        ((26, 5), "block", "", "", "by topology"),
        ((26, 5), "flat", "", "", "by name"),
        (None, "", "", "", "by name"),
    ],
)
def test_the_order_that_slurm_gives(version: Version, plugin: Plugin, params: str, scheduler: str, order: str) -> None:
    assert own_order(Slurm(version, plugin, params, scheduler)) == order


def test_what_scontrol_says() -> None:
    text = (
        "Configuration data as of 2026-01-01T00:00:00\nSLURM_VERSION           = 24.11.5\n"
        "SchedulerParameters     = (null)\nTopologyParam           = SwitchAsNodeRank,RoutePart\n"
        "TopologyPlugin          = topology/tree\n"
    )
    slurm = found(text)
    assert (slurm.version, slurm.plugin, slurm.params) == ((24, 11), "tree", "SwitchAsNodeRank,RoutePart")
    assert str(slurm) == "Slurm 24.11 with topology/tree"
    assert (slurm.release, slurm.confined) == ("24.11.5", False)
    assert found("nothing") == Slurm(None, "", "", ",", confined=False)
    quiet = found("TaskPlugin = task/cgroup\nConstrainCores = yes\n")
    assert "--cpu-bind=none" not in directives(quiet, Wanted(bind=True)).srun
    both = found("TaskPlugin = task/cgroup,task/affinity\nConstrainCores          = yes\n")
    assert "--cpu-bind=none" in directives(both, Wanted(bind=True)).srun
    alone = found("TaskPlugin = task/affinity\nConstrainCores          = yes\n")
    assert "--cpu-bind=none" not in directives(alone, Wanted(bind=True)).srun, "nobody confines without task/cgroup"
    loose = found("TaskPlugin = task/affinity,task/cgroup\nConstrainCores          = no\n")
    assert "--cpu-bind=none" not in directives(loose, Wanted(bind=True)).srun, (
        "CPUs of other jobs would be free to take"
    )
    assert "--cpu-bind=none" in directives(loose, Wanted(bind=True, whole=True)).srun
    assert found("TopologyPlugin = topology/none\n").plugin == "flat"
    assert found("TopologyPlugin = topology/3d_torus\n").plugin == "other"
