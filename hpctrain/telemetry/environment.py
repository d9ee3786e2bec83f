"""What a run ran with: versions, hardware, and the few environment variables that change its behaviour.

The environment as a whole is never recorded: run folders are shared, and it holds secrets.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import hpctrain
from hpctrain.files import write_whole

ENVIRONMENT_FILE = "environment.json"

PACKAGES = ("torch", "deepspeed", "h5py", "submitit", "mpi4py", "numpy", "pydantic")

NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"})
PREFIXES = (
    *("HPCTRAIN_", "SLURM_", "MASTER_", "NCCL_", "GLOO_", "UCX_", "FI_", "OMPI_COMM_WORLD_"),
    *("CUDA_", "TORCH_", "PYTORCH_", "DS_", "OMP_", "KMP_", "MKL_"),
)
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "JWT")


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how a run behaves, by name; none that may be a secret."""

    def wanted(name: str) -> bool:
        secret = any(word in name.upper() for word in SECRETS)
        return not secret and (name in NAMES or name.startswith(PREFIXES))

    return {name: environ[name] for name in sorted(environ) if wanted(name)}


def environment() -> dict[str, Any]:
    """The record of this process, its machine and its code, ready for JSON."""
    return {
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "gpus": gpu_names(),
        "source": source_commit(Path(hpctrain.__file__)),
        "variables": variables(os.environ),
    }


def write_environment(folder: Path) -> Path:
    """Write the record into a run folder; the file's path."""
    target = folder / ENVIRONMENT_FILE
    write_whole(target, json.dumps(environment(), indent=2) + "\n")
    return target


def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of those it stands on; None for one that is not installed.

    Read from what is installed, so that nothing is imported for it.
    """
    found: dict[str, str | None] = {"python": platform.python_version(), "hpctrain": hpctrain.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu_name() -> str:
    """The processor's model name."""
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((row.split(":", 1)[1].strip() for row in rows if row.startswith("model name")), platform.processor())


def gpu_names() -> list[str]:
    """Names of the GPUs this process sees. None are looked for where torch is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def source_commit(file: Path) -> dict[str, Any] | None:
    """Commit of the repository that tracks `file`, and whether tracked files differ from it.

    None where no repository does: an installed package may lie inside a repository that is not its own.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "modified": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints, or None if it fails or there is no git."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
