"""What a site changes: how its jobs ask for GPUs, time and CPUs, and what runs before the ranks.

A profile is a YAML file. Those that come with the package lie in `slurm_templates`; a site writes its own and
names the file with `--profile` or `cluster.profile`. Keys are strict: one that does not exist is refused.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from hpctrain.cluster.unfold import Domains, Leaves
from hpctrain.config import plain_yaml
from hpctrain.config.keys import nearest
from hpctrain.config.schema import Count, Natural, RunConfig, Section
from hpctrain.errors import ConfigError

if TYPE_CHECKING:
    from importlib.abc import Traversable

TIME = r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d|UNLIMITED|INFINITE"
"""A time limit as Slurm writes it: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s."""

LIVE, SLURM = "live", "slurm"
"""Words for `node` and `fabric` that are no files."""

Word = Annotated[str, Field(pattern=r"^[^\s'\"]+$")]
Absolute = Annotated[str, Field(pattern=r"^/[^\s'\"]+$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]
Time = Annotated[str, Field(pattern=f"^({TIME})$")]
Line = Annotated[str, Field(pattern=r"^[^\n\r]*$")]

OWN_FLAGS = {
    *("array", "chdir", "cpus-per-task", "dependency", "error", "gpus-per-node", "gres", "job-name", "nodes", "ntasks"),
    *("ntasks-per-node", "open-mode", "output", "requeue", "segment", "signal", "switches"),
    *("cluster", "clusters", "no-requeue", "test-only", "wait"),
}
"""Flags of sbatch that are written from the configuration, or would take away what it counts on (a job that is where
Slurm's other commands look for it, and requeues itself; an sbatch that queues it and returns), so a profile cannot set
them."""


def _foreign(flags: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(OWN_FLAGS & flags.keys()):
        raise ValueError(f"{', '.join(taken)} is not a profile's to set")
    return flags


class Container(Section):
    """What the ranks run in. The run folder, the corpus and the code are mounted at the paths they have outside."""

    kind: Literal["pyxis", "enroot", "apptainer"] = Field(description="pyxis is srun's --container-image.")
    image: Word = Field(description="As the tool names it: registry, .sqsh or .sif file.")
    python: Word = Field("python3", description="In the container, with hpctrain's requirements installed.")
    mounts: tuple[Word, ...] = Field((), description="More of them, FROM:TO.")
    args: tuple[Line, ...] = Field((), description="Further arguments of the tool, one each.")


class Profile(Section):
    """A site, as far as its jobs are concerned."""

    about: Line = Field(description="What it is for, in a line.")
    partition: Word | None = Field(None, description="Where jobs go; none leaves it to Slurm.")
    account: Word | None = Field(None, description="Who pays.")
    qos: Word | None = Field(None, description="Quality of service.")
    constraint: Word | None = Field(None, description="Features that nodes must have.")
    time: Time | None = Field(None, description="Time limit; none leaves it to Slurm.")
    gpus: Literal["gres", "gpus-per-node", "none"] = Field("gres", description="How GPUs are asked for.")
    emulated: bool = Field(
        False, description="Its GPUs are counted by Slurm alone, as a practice cluster's: bench takes gloo."
    )
    gpu_type: Word | None = Field(None, description="As in gres:gpu:TYPE:4.")
    cpus_per_task: Count | None = Field(None, description="CPUs of a rank; none leaves it to Slurm.")
    mem: Word | None = Field(None, description="Memory of a node; 0 is all of it.")
    exclusive: bool = Field(False, description="No other job on its nodes.")
    signal_lead_s: Natural = Field(120, description="Seconds before the time limit at which ranks are warned.")
    mpi: Word | None = Field(None, description="srun --mpi: pmix, pmi2, none; nothing leaves it to Slurm.")
    sbatch: Annotated[dict[Flag, Word | int | bool], AfterValidator(_foreign)] = Field(
        {}, description="Other flags of sbatch, without dashes: true is the bare flag."
    )
    node: Word | None = Field(
        None, description="What nodes are like: live reads the first one of the job, or a file beside the profile."
    )
    fabric: Word | None = Field(
        None, description="Switches: slurm asks scontrol show topology, or a file beside the profile."
    )
    rail_leaves: Leaves = Field(
        "auto",
        description="Rails of a host of whose leaf switches Slurm shows one: separate (rail-optimized) or shared.",
    )
    nvlink_domains: Domains = Field(
        "auto", description="Blocks of Slurm's topology that are NVLink domains: blocks, hosts, or as the GPUs say."
    )
    nccl_topo: Absolute | None = Field(
        None, description="NCCL_TOPO_FILE, on the nodes, where a machine hides its PCI tree."
    )
    switches: Annotated[str, Field(pattern=rf"^\d+(@({TIME}))?$")] | None = Field(
        None, description="Leaf switches at most, and how long to wait for them: 1@10:00. Of topology/tree."
    )
    segment: Count | Literal["auto"] | None = Field(
        None, description="Nodes that have to be in one block; auto is the most that divides them. Of topology/block."
    )
    spares: Natural = Field(0, description="Nodes asked for beyond those needed; the best ones are used.")
    health: bool = Field(False, description="Measure nodes and links before ranks start, and leave out slow ones.")
    srun_args: tuple[Line, ...] = Field((), description="Further arguments of srun, one each.")
    environment: dict[Name, Line] = Field({}, description="Exported before the prologue.")
    prologue: Word | None = Field(None, description="A file of bash beside the profile, run before the ranks.")
    container: Container | None = None


class Site(Section):
    """A profile, where it came from, and the texts of its prologue and of the files that describe nodes and fabric."""

    name: str
    profile: Profile
    prologue: str = ""
    node: str = ""
    fabric: str = ""


def profiles() -> dict[str, Traversable]:
    """The profiles of the package by name, sorted."""
    found = [file for file in _templates().iterdir() if file.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): file for file in sorted(found, key=lambda file: file.name)}


def site(name: str) -> Site:
    """A profile of the package, or one in a file.

    Args:
        name: of the profile; with a slash or an ending in .yaml or .yml it is a path.

    Raises:
        ConfigError: there is none, it is not YAML, or a key or value in it is wrong.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        file: Traversable | Path = Path(name)
        beside: Traversable | Path = Path(name).parent
    else:
        known = profiles()
        if name not in known:
            near = nearest(name, known)
            fix = f"the nearest is {near}" if near else f"they are {', '.join(known)}"
            raise ConfigError("cluster.profile", name, "there is no such profile", f"{fix}, or name a file with .yaml")
        file, beside = known[name], _templates()
    profile = _parse(_text(file, name), name)

    def beside_it(key: str, value: str | None, but: str = "") -> str:
        return _text(beside.joinpath(value), f"{name}: {key}") if value and value != but else ""

    return Site(
        name=name,
        profile=profile,
        prologue=beside_it("prologue", profile.prologue),
        node=beside_it("node", profile.node, LIVE),
        fabric=beside_it("fabric", profile.fabric, SLURM),
    )


def healthy(site: Site, config: RunConfig, health: bool = False) -> Site:
    """The site with what a run says about its health step and spare nodes over what the profile says.

    Args:
        health: it was asked for at the submission.
    """
    cluster, profile = config.cluster, site.profile
    wanted = {"health": health or cluster.health or profile.health, "spares": cluster.spares or profile.spares}
    return site.model_copy(update={"profile": profile.model_copy(update=wanted)})


def check_time(text: str) -> str:
    """A time limit as given on the command line.

    Raises:
        ConfigError: Slurm would not understand it.
    """
    if not re.fullmatch(TIME, text):
        raise ConfigError("--time", text, "must be a time limit of Slurm", "for example 90, 1:30:00 or 2-0")
    return text


def check_lead(profile: Profile, limit: str | None) -> None:
    """Refuse a job that would be warned as soon as it begins, and requeue itself at every step.

    Args:
        profile: of the site.
        limit: time limit of the submission, over the profile's.

    Raises:
        ConfigError: names both.
    """
    time = limit or profile.time
    seconds = limit_seconds(time) if time and time[0].isdigit() else None
    if seconds and profile.signal_lead_s >= seconds:  # to Slurm, 0 is no limit
        raise ConfigError(
            "--time",
            str(time),
            f"is {seconds} s, and the profile has ranks warned {profile.signal_lead_s} s before the limit",
            "ask for more time, or use a profile with a smaller signal_lead_s",
        )


def limit_seconds(text: str) -> int:
    """Seconds of a time limit as sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours, ...

    Source: the man page of sbatch, option --time.
    """
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 1:
        hours, minutes, seconds = 0, parts[0], 0
    elif len(parts) == 2:
        hours, minutes, seconds = 0, *parts
    else:
        hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _templates() -> Traversable:
    return files("hpctrain.launch").joinpath("templates")


def _text(file: Traversable | Path, what: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("cluster.profile", what, f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("cluster.profile", what, f"{file} must be text in UTF-8") from None


def _parse(text: str, name: str) -> Profile:
    try:
        tree = plain_yaml.read(text)
    except ValueError as error:
        raise ConfigError("cluster.profile", name, f"must be YAML, but {error}") from None
    try:
        return Profile.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise ConfigError("cluster.profile", name, f"{path or 'it'}: {_words(first, path)}") from None


def _words(found: Any, path: str) -> str:
    if found["type"] == "extra_forbidden":
        near = nearest(path, Profile.model_fields)
        return "there is no such key" + (f", the nearest is {near}" if near else "")
    if found["type"] == "missing":
        return "it must be there"
    return f"{found['input']!r} does not fit ({found['msg'][:1].lower()}{found['msg'][1:]})"


def node_memory(profile: Profile) -> int | None:
    """Bytes that a job gets of a node, where the profile says so as sbatch takes it: MiB, or K, M, G or T behind it."""
    match = re.fullmatch(r"([1-9][0-9]*)([KMGT]?)", profile.mem or "", re.IGNORECASE)
    return int(match[1]) << {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[match[2].upper()] if match else None
