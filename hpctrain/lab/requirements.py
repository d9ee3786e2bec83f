"""What a lab needs of the machine; its absence is one sentence that says how to mend it."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

from hpctrain.errors import LabError

PROGRAMS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "chrt": "util-linux",
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

RAILS = {"ip": "iproute2", "tc": "iproute2"}

FABRIC = """
ip link add name leaf0 type bridge
ip link add name n0-rail0 type veth peer name rail0
ip rule add from 10.1.0.10 lookup 100
tc qdisc add dev rail0 root tbf rate 1mbit burst 128kb limit 512kb
mount -t sysfs sysfs /sys
"""
"""What the parts of a fabric ask of the kernel, each once."""

ROOTLESS = (
    "--user",
    "--map-current-user",
    "--keep-caps",
    "--pid",
    "--mount",
    "--uts",
    "--ipc",
    "--fork",
    "--mount-proc",
)
MACHINE = """
mount -t tmpfs shm /dev/shm
hostname n0
touch /dev/shm/gpu0
mount --bind /dev/null /dev/shm/gpu0
"""
"""What a machine of a lab without root asks of the system."""

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
    if os.geteuid() != 0 and (said := _refuses(["unshare", *ROOTLESS, "sh", "-ec", MACHINE])):
        return (
            "a lab needs root, or a system that gives user namespaces to everybody, and this one does not: it said "
            f"{said!r}; run the command with sudo."
        )
    return None


def obstacle_to_rails() -> str | None:
    """Why a lab here can have no networks of its own, as a sentence; None if it can."""
    missing = sorted({package for name, package in RAILS.items() if not shutil.which(name, path=PATH)})
    if missing:
        return f"rails need {' '.join(missing)}; on Debian or Ubuntu: apt-get install {' '.join(missing)}."
    if os.geteuid() != 0:
        return "rails need root, for networks and their rates; run the command with sudo."
    if said := _refuses(["unshare", "--net", "--mount", "sh", "-ec", FABRIC]):
        return (
            "rails need network namespaces with bridges, veth pairs and token buckets (tbf), and this machine's "
            f"kernel or container does not give them: it said {said!r}."
        )
    return None


def _refuses(command: list[str]) -> str:
    """What a command says that fails; "" for one that does not."""
    tried = subprocess.run(command, env={"PATH": PATH}, capture_output=True, text=True, timeout=20)
    return (tried.stderr.strip() or "nothing").splitlines()[-1].rstrip(".") if tried.returncode else ""


def user() -> str:
    """Who runs the lab: this process's user."""
    return pwd.getpwuid(os.geteuid()).pw_name


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
