"""Options of `hpctrain bench` that were given and would change nothing: each is refused, with what it goes with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click
from click.core import ParameterSource

from hpctrain.errors import ConfigError

Rule = tuple[str, bool, str]
"""A parameter, whether something comes of it, and what it is for."""

JOB = ("detach", "nodes", "profile", "partition", "account", "time_limit")
"""What is said of jobs."""

LATER = ("as_json", "csv_file", "store", "png", "baseline", "profile_out")
"""What needs a result."""


def given(name: str) -> bool:
    """Whether the command that runs was given this parameter, and did not take its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def refuse_unused(rules: Iterable[Rule]) -> None:
    """Refuse what was given in vain.

    Raises:
        ConfigError: names the first of them.
    """
    context = click.get_current_context()
    flags = {p.name: max(p.opts, key=len) for p in context.command.params}
    for name, used, what in rules:
        if not used and given(name):
            raise ConfigError(flags[name], _shown(context.params.get(name)), what, "leave it out")


def _shown(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value if isinstance(value, bool) else str(value)


def of_jobs() -> list[Rule]:
    """Of where ranks run: some options are of jobs, and a job for which nobody waits has no result yet."""
    params = click.get_current_context().params
    submitted, detached = bool(params["submit"]), bool(params["detach"])
    rules: list[Rule] = [(name, submitted, "is of a job of Slurm, and goes with --submit") for name in JOB]
    return rules + [
        (name, not detached, "needs a result, and with --detach there is none yet: jobs leave theirs in --folder")
        for name in LATER
        if name in params
    ]


def of_operations(names: Sequence[str]) -> list[Rule]:
    """Of what is measured."""
    from hpctrain.comms.formulas import OPERATIONS

    known = [name for name in names if name in OPERATIONS]  # others are refused in words of their own
    if len(known) < len(names):
        return []
    sends = any(name != "barrier" for name in known)
    means = set(known) != {"all_to_all_v"}
    return [
        ("sizes", sends, "a barrier has no size"),
        ("dtypes", sends, "a barrier has no elements"),
        ("checks", sends, "a barrier has no result to check"),
        ("reductions", any(OPERATIONS[name].reduces for name in known), f"{', '.join(known)}: nothing is reduced"),
        ("root", any(OPERATIONS[name].rooted for name in known), f"{', '.join(known)}: there is no root"),
        ("matrix", "all_to_all_v" in known, "is for --op all_to_all_v"),
        ("average", means, "an uneven all-to-all takes as long as its slowest rank"),
    ]


def of_groups(names: Sequence[str]) -> list[Rule]:
    """Of who talks to whom."""
    from hpctrain.layout.layout import AXES, EXPERT_AXES

    axes = {"axes", *AXES, *EXPERT_AXES}
    return [
        ("layout", any(set(name.split("+")) & axes for name in names), "is for --groups by axis: axes, tp, dp+cp, ..."),
        ("fabric", "leaf" in names, "is for --groups leaf"),
        ("alone", set(names) != {"world"}, "the world is one group, beside which there is none"),
    ]
