"""A scaling study as plain data: which runs it is made of, and how it is remembered between calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.config.load import load
from hpctrain.config.schema import RunConfig
from hpctrain.config.validate import validate
from hpctrain.errors import ConfigError, DataError
from hpctrain.files import write_whole
from hpctrain.train.preflight import make_run_folder

STUDY_FILE = "study.json"

Kind = Literal["weak", "strong"]


@dataclass(frozen=True)
class Study:
    """One study; its folder is the run folder of `base`.

    Attributes:
        kind: weak scaling gives every node the work of the smallest size, strong scaling shares that among all.
        base: what is run, at the smallest size.
        nodes: sizes, ascending.
        repeats: runs of each size.
        warm_up: first steps of a run that do not count.
        here: without Slurm: a node is `base.cluster.gpus_per_node` ranks of this machine.
        best: each size has the best layout that the planner finds, whatever `base` says; for predictions alone.
    """

    kind: Kind
    base: RunConfig
    nodes: tuple[int, ...]
    repeats: int = 1
    warm_up: int = 3
    here: bool = False
    best: bool = False

    @property
    def folder(self) -> Path:
        return self.base.run_folder

    @property
    def strong(self) -> bool:
        return self.kind == "strong"

    def size(self, nodes: int) -> RunConfig:
        """What is run on so many nodes; its run folder holds those of the repeats.

        Raises:
            ConfigError: the layout does not fit so many ranks.
        """
        base, per_node = self.base, self.base.cluster.gpus_per_node
        where = {"nodes": 1, "gpus_per_node": nodes * per_node} if self.here else {"nodes": nodes}
        batch = base.train.global_batch
        if not self.strong:
            batch = batch * nodes // self.nodes[0]  # whole, as dp grows as much
        changed = base.model_copy(
            update={
                "folder": self.folder,
                "name": f"{nodes}-node{'s' * (nodes > 1)}",
                "cluster": base.cluster.model_copy(update=where),
                "train": base.train.model_copy(update={"global_batch": batch}),
            }
        )
        if self.best:
            return changed
        try:
            validate(changed, changed.cluster.nodes * changed.cluster.gpus_per_node)
        except ConfigError as error:
            raise of_size(error, nodes) from None
        return changed

    def runs(self, nodes: int) -> tuple[RunConfig, ...]:
        """All runs of a size."""
        size = self.size(nodes)
        return tuple(
            size.model_copy(update={"folder": size.run_folder, "name": f"run-{i + 1}"}) for i in range(self.repeats)
        )

    def plain(self) -> dict[str, Any]:
        """For its file."""
        return {
            "kind": self.kind,
            "nodes": list(self.nodes),
            "repeats": self.repeats,
            "warm_up": self.warm_up,
            "here": self.here,
            "base": self.base.model_dump(mode="json"),
        }


SHORT = {
    "optimizer": {"schedule": "constant", "warmup_steps": 0, "decay_steps": 0},
    "checkpoint": {"every": 0, "at_end": False, "resume": "auto", "continue_from": None},
}
"""A run of a study measures steps and nothing else."""


def of_size(error: ConfigError, nodes: int) -> ConfigError:
    """What is wrong with one size of a study."""
    fix = f"{error.fix}; " if error.fix else ""
    where = f"on {nodes} node{'s' * (nodes > 1)}: "
    return ConfigError(error.path, error.value, where + error.allowed, f"{fix}or leave nodes={nodes} out")


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of nodes, ascending, of `1,2,4`.

    Raises:
        ConfigError: they are none.
    """
    listed = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in listed):
        raise ConfigError("nodes", text, "must be whole numbers above 0 with commas between", "for example nodes=1,2,4")
    return tuple(sorted({int(part) for part in listed}))


def apart(overrides: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers of nodes among `key=value` arguments, and the other arguments.

    Raises:
        ConfigError: there are none.
    """
    found = [text.partition("=")[2] for text in overrides if text.partition("=")[0].strip() == "nodes"]
    if not found:
        raise ConfigError("nodes", "", "the sizes of the study must be given", "for example nodes=1,2,4")
    return sizes(found[-1]), tuple(text for text in overrides if text.partition("=")[0].strip() != "nodes")


def make(
    kind: Kind,
    recipe: str,
    overrides: Sequence[str],
    nodes: tuple[int, ...],
    steps: int,
    warm_up: int,
    repeats: int,
    here: bool,
    best: bool = False,
) -> Study:
    """A study of a recipe.

    Raises:
        ConfigError: settings cannot run at one of the sizes, or no step would be left to measure.
    """
    if steps - warm_up < 2:
        raise ConfigError("--steps", steps, f"must leave 2 steps after a warm-up of {warm_up}", f"use {warm_up + 2}")
    loaded = load(recipe, overrides)
    named = any(text.partition("=")[0].strip() == "name" for text in overrides)
    short = {section: getattr(loaded, section).model_copy(update=values) for section, values in SHORT.items()}
    train = {"steps": steps, "log_every": 1, "eval_every": 0, "eval_batches": 0}
    base = loaded.model_copy(
        update={
            **short,
            "name": loaded.name if named else f"{loaded.name}-{kind}",
            "train": loaded.train.model_copy(update=train),
            "cluster": loaded.cluster.model_copy(update={"nodes": nodes[0]}),
        }
    )
    study = Study(kind, base, nodes, repeats, warm_up, here, best)
    for number in nodes:
        study.size(number)
    return study


def read(folder: Path) -> Study:
    """The study in a folder.

    Raises:
        DataError: there is none, or its file is damaged.
    """
    path = folder / STUDY_FILE
    try:
        found = json.loads(path.read_text())
        base = RunConfig.model_validate_json(json.dumps(found["base"]))
        rest = {name: found[name] for name in ("kind", "repeats", "warm_up", "here")}
        return Study(base=base, nodes=tuple(found["nodes"]), **rest)
    except FileNotFoundError:
        raise DataError(f"{folder} holds no scaling study: hpctrain scale weak or strong makes one.") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is damaged: remove it, and start the study again; runs that are done count.") from None


def remembered(study: Study) -> Study:
    """The study with what its folder knows of it, written there. Sizes and repeats may be added.

    Raises:
        ConfigError: the folder holds a study of other settings, or cannot be made.
    """
    if (study.folder / STUDY_FILE).exists():
        old = read(study.folder)
        _same(old, study)
        study = replace(
            study,
            nodes=tuple(sorted({*old.nodes, *study.nodes})),
            repeats=max(old.repeats, study.repeats),
            base=old.base,
        )
        for number in study.nodes:
            study.size(number)
    make_run_folder(study.base)
    write_whole(study.folder / STUDY_FILE, json.dumps(study.plain(), indent=1) + "\n")
    return study


def _same(old: Study, new: Study) -> None:
    """Refuse other settings than those of the runs that are there."""

    def settings(of: Study) -> dict[str, Any]:
        plain = of.plain()
        flat = {name: plain[name] for name in ("kind", "warm_up", "here")}
        for section, values in plain["base"].items():
            flat |= {f"{section}.{k}": v for k, v in values.items()} if isinstance(values, dict) else {section: values}
        return {key: value for key, value in flat.items() if key not in ("cluster.nodes",)}

    was, now = settings(old), settings(new)
    differs = next((key for key in was if was[key] != now.get(key)), None)
    if differs is None and (new.strong or old.nodes[0] == new.nodes[0]):
        return
    if differs is None:
        differs, was, now = "smallest size", {"smallest size": old.nodes[0]}, {"smallest size": new.nodes[0]}
    allowed = f"{new.folder} holds a study whose {differs} is {was[differs]!r}, not {now[differs]!r}"
    raise ConfigError("name", new.base.name, allowed, "choose another name=... for another study")
