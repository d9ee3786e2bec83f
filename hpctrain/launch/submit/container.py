"""How a command runs in a container: arguments of srun, or words before it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain.launch.slurm.profile import Container, Profile

PASSED = (
    "HPCTRAIN_",
    "SLURM",
    "PMI",
    "SUBMITIT",
    "PYTHONPATH$",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "OMP_",
    "TORCH_",
)
"""Beginnings of the variables that enter a container which does not inherit them."""


def _mounts(container: Container, used: Sequence[Path]) -> list[str]:
    """FROM:TO of everything that ranks read or write."""
    paths = dict.fromkeys(used)
    inside = [p for p in paths if not any(other in p.parents for other in paths)]
    return [*(f"{path}:{path}" for path in inside), *container.mounts]


def srun_args(container: Container, used: Sequence[Path]) -> list[str]:
    """Arguments of srun that put tasks into a container, where it knows any."""
    if container.kind != "pyxis":
        return []
    mounts = ",".join(_mounts(container, used))
    found = [f"--container-image={container.image}", f"--container-mounts={mounts}", *container.args]
    return [shlex.quote(argument) for argument in found]


def in_container(profile: Profile, container: Container, used: Sequence[Path], command: list[str]) -> list[str]:
    """The words of a command that runs in a container."""
    inside = [container.python, *command[1:]]
    mounts = _mounts(container, used)
    args = [shlex.quote(argument) for argument in container.args]
    if container.kind == "apptainer":
        binds = [f"--bind={mount}" for mount in mounts]
        return ["apptainer", "exec", "--nv", *binds, *args, shlex.quote(container.image), *inside]
    if container.kind == "enroot":
        # It gives the container an environment of its own: what a task needs is passed by name, on its node.
        start = ["enroot", "start", *(f"--mount={mount}" for mount in mounts), *args]
        wanted = "|".join([*PASSED, *(f"{name}$" for name in profile.environment)])
        names = f"$(compgen -e | grep -E '^({wanted})' | sed s/^/--env=/)"
        return ["bash", "-c", shlex.quote(" ".join([*start, names, container.image, *inside]))]
    return inside
