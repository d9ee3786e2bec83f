"""What a lab needs of the machine; its absence is one sentence that says how to mend it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from hpctrain.errors import LabError

PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "bash": "bash",
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
}
"""Programs and the packages of Debian that they are in."""

ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}

OLDEST = (22, 5)
"""Of Slurm: the oldest that warns a preempted job with the signal that it asked for, and was tried."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def obstacle(accounting: bool = False) -> str | None:
    """Why no lab can be brought up here, as a sentence; None if one can."""
    wanted = PROGRAMS | (ACCOUNTING if accounting else {})
    missing = sorted({package for name, package in wanted.items() if not shutil.which(name, path=PATH)})
    if missing:
        return (
            f"a lab needs programs that are not here; on Debian or Ubuntu: "
            f"apt-get install --no-install-recommends {' '.join(missing)}."
        )
    version = slurm_version()
    if version < OLDEST:
        found, needed = (f"{major}.{minor:02}" for major, minor in (version, OLDEST))
        return f"this machine has Slurm {found}, and a lab needs {needed} or later."
    if os.geteuid() != 0:
        return "a lab needs root, for namespaces and device nodes; run the command with sudo."
    return None


def check(accounting: bool = False) -> None:
    """Raises LabError unless a lab can be brought up here."""
    if said := obstacle(accounting):
        raise LabError(said)


def slurm_version() -> tuple[int, int]:
    """Major and minor version of slurmd, (0, 0) if it will not say."""
    slurmd = shutil.which("slurmd", path=PATH) or "slurmd"
    said = subprocess.run([slurmd, "-V"], capture_output=True, text=True, timeout=10).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def pmix() -> bool:
    """Whether `srun --mpi=pmix` works: Slurm opens the library by a name that only the -dev package has."""
    return any(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so"))


def memory_mb() -> int:
    """MiB of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
