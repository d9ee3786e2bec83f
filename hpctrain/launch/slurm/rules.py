"""What each version of Slurm takes, as one table: wishes go in, flags come out, and a sentence for each that did not.

Versions and reasons are those of Slurm's CHANGELOG and manual pages, 22.05 to 26.05. Nothing else in this package asks
for a version of Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from hpctrain.errors import ConfigError

Version = tuple[int, int]
Plugin = Literal["tree", "block", "flat", "other", ""]
"""Of topology; "" where it is not known."""

RACK = 18
"""Nodes of an NVLink domain of 72 GPUs, so the largest segment that is taken by itself."""

UNBOUND = "--cpu-bind=none"

TASK_BOUND = re.compile(r"--(gpus-per-task|ntasks-per-gpu|gpu-bind|tres-bind|tres-per-task)\b")
"""Arguments of srun that give a task GPUs of its own, and hide the others from it."""


@dataclass(frozen=True)
class Slurm:
    """The Slurm that was found.

    Attributes:
        version: None where it is not known.
        plugin: of topology.
        params: TopologyParam, as it is.
        scheduler: SchedulerParameters and SelectTypeParameters, as they are.
        masks: it sets CPU masks of tasks (TaskPlugin=task/affinity).
        confined: without a mask a task still has the CPUs of its step alone: by ConstrainCores of cgroup.conf, which is
            nothing without task/cgroup. What is not known is taken for no.
        release: all of its version, such as 24.11.5.
        unanswered: why its controller did not say all this; "" if it did.
    """

    version: Version | None = None
    plugin: Plugin = ""
    params: str = ""
    scheduler: str = ""
    masks: bool = True
    confined: bool = True
    release: str = ""
    unanswered: str = ""

    @staticmethod
    def of(said: str, unanswered: str = "") -> Slurm:
        """By the text of a version alone: `slurm 22.05.8`."""
        number = re.search(r"(\d+)\.(\d+)\.\d+\S*", said)
        version = (int(number[1]), int(number[2])) if number else None
        release = number[0] if number else ""
        return Slurm(version, confined=not unanswered, release=release, unanswered=unanswered)

    def since(self, version: Version) -> bool:
        """Whether it is at least that; one that is not known counts as new."""
        return self.version is None or self.version >= version

    def __str__(self) -> str:
        name = f"Slurm {self.version[0]}.{self.version[1]:02}" if self.version else "a Slurm of unknown version"
        return f"{name} with topology/{self.plugin}" if self.plugin else name


@dataclass(frozen=True)
class Wanted:
    """What a job wants of Slurm, whatever its version.

    Attributes:
        nodes: of the job.
        cpus_per_task: None leaves it to Slurm.
        segment: nodes that have to be in one block; "auto" is the largest number up to a rack that divides the nodes.
        switches: leaf switches at most, with the longest wait if there is one: 1@10:00.
        arbitrary: every task has a node of its own choice, in a file.
        bind: the ranks set their CPUs themselves.
        whole: no other job is on the nodes.
        srun_args: the profile's.
    """

    nodes: int = 1
    cpus_per_task: int | None = None
    segment: int | Literal["auto"] | None = None
    switches: str | None = None
    arbitrary: bool = False
    bind: bool = False
    whole: bool = False
    srun_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Directives:
    """Flags for sbatch, without dashes, and for srun; and what was left out, a sentence each."""

    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """One flag.

    Attributes:
        command: that takes it.
        flag: its text for a job, "" where it is not wanted; one that cannot be raises a ConfigError.
        since: first version that has it.
        before: first version that does not take it with these plugins; None: none.
        plugins: with which it means anything; (): all.
        without: what to do where it cannot be had, as the end of a sentence.
        instead: flag that is used then.
    """

    command: Literal["sbatch", "srun"]
    flag: Callable[[Wanted], str]
    since: Version = (0, 0)
    before: Version | None = None
    plugins: tuple[Plugin, ...] = ()
    refused: tuple[Plugin, ...] = ()
    without: str = ""
    instead: str = ""


def _segment(wanted: Wanted) -> str:
    size = wanted.segment
    if size is None or size == "auto":
        size = segment(wanted.nodes) if size else None
        return f"segment={size}" if size and size > 1 else ""
    if wanted.nodes % size:
        near = [n for n in range(1, wanted.nodes + 1) if wanted.nodes % n == 0]
        raise ConfigError("segment", size, f"must divide the {wanted.nodes} nodes of the job", f"use one of {near}")
    return f"segment={size}"


def segment(nodes: int) -> int:
    """The largest segment up to a rack that divides a number of nodes."""
    return max(n for n in range(1, min(nodes, RACK) + 1) if nodes % n == 0)


def _hidden(wanted: Wanted) -> str:
    return "--gres-flags=allow-task-sharing" if any(map(TASK_BOUND.match, wanted.srun_args)) else ""


RULES = (
    # Inherited from sbatch but in 22.05 and 23.02, which give a task one CPU. Said to srun it implies --exact from
    # 22.05 on (21.08 was meant to): a step has so many CPUs for each of its tasks, and others of its nodes stay idle.
    Rule("srun", lambda w: f"--cpus-per-task={w.cpus_per_task}" if w.cpus_per_task else ""),
    # 26.05 gives steps of topology/block their nodes in its own order.
    Rule(
        "srun",
        lambda w: "--distribution=arbitrary" if w.arbitrary else "--distribution=block:block",
        instead="--distribution=block:block",
        before=(26, 5),
        refused=("block",),
        without="ranks keep the order of Slurm, which follows blocks there",
    ),
    # Ranks choose among all CPUs of the step. Slurm's own masks follow sockets, not GPUs, and hold one task's share.
    Rule("srun", lambda w: UNBOUND if w.bind else ""),
    Rule(
        "srun",
        _hidden,
        since=(24, 5),  # 23.11 has it and counts GPUs wrongly
        without="each task is given GPUs of its own there and sees no other, so NVLink between ranks is lost: leave "
        "--gpus-per-task, --gpu-bind and --tres-bind out of srun_args",
    ),
    Rule("sbatch", _segment, since=(24, 5), plugins=("block",), without="nodes come from any blocks"),
    Rule(
        "sbatch",
        lambda w: f"switches={w.switches}" if w.switches else "",
        plugins=("tree",),
        without="nodes come from any leaf switches",
    ),
)

TRAPS = (
    (r"--gpu-bind=.*single", (23, 2), "--gpu-bind=single binds the wrong GPUs before 23.02"),
    (r"--tres-bind=.*(map|mask)", (24, 11), "--tres-bind with map or mask is wrong on a part of a node before 24.11"),
    (r"--gres-flags=.*allow-task-sharing", (24, 5), "allow-task-sharing counts GPUs wrongly before 24.05"),
)
"""Arguments of srun that older versions get wrong: what, up to which version, and how."""


def directives(slurm: Slurm, wanted: Wanted) -> Directives:
    """The flags of a job.

    Raises:
        ConfigError: a wish that no version could meet.
    """
    flags: dict[str, list[str]] = {"sbatch": [], "srun": []}
    left_out: list[str] = []
    for rule in RULES:
        flag = rule.flag(wanted)
        if not flag or (flag == UNBOUND and not _may_unbind(slurm, wanted)):
            continue
        if flag == rule.instead or not (why := _why_not(rule, slurm)):
            flags[rule.command].append(flag)
            continue
        left_out.append(f"--{flag.lstrip('-')} is left out: {slurm} {why}, so {rule.without}")
        flags[rule.command] += [rule.instead] * bool(rule.instead)
    for pattern, before, said in TRAPS:
        if slurm.version and slurm.version < before and any(re.match(pattern, arg) for arg in wanted.srun_args):
            left_out.append(f"{said}, and this is {slurm}")
    return Directives(tuple(flags["sbatch"]), tuple(flags["srun"]), tuple(left_out))


def _may_unbind(slurm: Slurm, wanted: Wanted) -> bool:
    """Whether tasks without a mask stay on the CPUs of their job; where Slurm sets none, it complains of the flag."""
    return slurm.masks and (wanted.whole or slurm.confined)


def _why_not(rule: Rule, slurm: Slurm) -> str:
    if not slurm.since(rule.since):
        return f"has it from {rule.since[0]}.{rule.since[1]:02} on"
    if rule.plugins and slurm.plugin and slurm.plugin not in rule.plugins:
        return f"takes it only with topology/{rule.plugins[0]}"
    if slurm.plugin in rule.refused and rule.before and slurm.since(rule.before):
        return "refuses it"
    return ""


def own_order(slurm: Slurm) -> Literal["by name", "by topology"]:
    """In which order Slurm numbers the nodes of a job, and so its ranks.

    By name, unless the tree is told otherwise (SwitchAsNodeRank, 23.02), or blocks are: in the order of their file
    before 25.05, by name then, as told from 25.11 on (BlockAsNodeRank). From 26.05 on steps follow the topology unless
    CR_NO_DIST_TOPO_BLOCK.
    """
    told = slurm.params.lower()
    if slurm.version and slurm.version >= (26, 5) and slurm.plugin in ("tree", "block"):
        return "by name" if "cr_no_dist_topo_block" in slurm.scheduler.lower() else "by topology"
    if slurm.plugin == "tree" and slurm.since((23, 2)) and "switchasnoderank" in told:
        return "by topology"
    if slurm.plugin == "block" and slurm.version:
        old = slurm.version < (25, 5)
        return "by topology" if old or (slurm.since((25, 11)) and "blockasnoderank" in told) else "by name"
    return "by name"


def found(config: str) -> Slurm:
    """The Slurm that `scontrol show config` describes."""
    said = {key: value.strip() for key, value in re.findall(r"(?m)^(\w+)\s*=(.*)$", config)}
    tasks = said.get("TaskPlugin", "affinity")
    return replace(
        Slurm.of(said.get("SLURM_VERSION", "")),
        plugin=_plugin(said.get("TopologyPlugin", "")),
        params=said.get("TopologyParam", ""),
        scheduler=",".join(said.get(key, "") for key in ("SchedulerParameters", "SelectTypeParameters")),
        masks="affinity" in tasks,
        confined="cgroup" in tasks and said.get("ConstrainCores", "no").lower() == "yes",
    )


def _plugin(said: str) -> Plugin:
    name = said.removeprefix("topology/")
    known: dict[str, Plugin] = {"tree": "tree", "block": "block", "flat": "flat", "none": "flat", "default": "flat"}
    return known.get(name, "other" if name and name != "(null)" else "")
