"""DeepSpeed's compiled ops: which are built, building them ahead of time, and the locks that builds leave behind.

PyTorch guards the build of an extension with a file that says neither who made it nor when it may go: a build
that was killed leaves every later one waiting for ever. Our builds run under a lock of our own that the kernel
releases with its holder, so that what they leave is known to be stale.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.errors import ConfigError, LaunchError
from hpctrain.files import NETWORK, file_system

BUILDERS = {"fused_adam": "FusedAdamBuilder", "cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}
"""The ops that this project can use, and what DeepSpeed calls their builders."""

USES = {
    "fused_adam": "AdamW in one kernel (sharding.torch_adam=false); without it torch's AdamW is used",
    "cpu_adam": "AdamW of DeepSpeed's own offloading, to compare with; sharding.offload.* does without",
    "async_io": "reading and writing of DeepSpeed's own offloading, to compare with; sharding.offload.* does without",
}
"""What each is for and what its absence costs."""

QUIET_S = 2 * 3600.0
"""On a file system that other hosts share, a lock is stale when nothing beside it has changed for this long."""


@dataclass(frozen=True)
class OpStatus:
    """State of one op: `built`, `can build`, or `cannot build`, and why."""

    name: str
    state: Literal["built", "can build", "cannot build"]
    detail: str


@dataclass(frozen=True)
class BuildLock:
    """A lock of PyTorch's extension builds.

    Attributes:
        path: of the lock file.
        verdict: whether a build holds it.
        detail: how that is known.
    """

    path: Path
    verdict: Literal["in use", "stale", "cannot tell"]
    detail: str


@dataclass(frozen=True)
class Outcome:
    """How the build of one op went; `log` holds the compiler's output."""

    name: str
    ok: bool
    seconds: float
    detail: str
    log: Path


def extensions_folder() -> Path:
    """Where PyTorch builds extensions for this Python and device kind."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("hpctrain", verbose=False)).parent


def op_names(names: Sequence[str]) -> list[str]:
    """The ops asked for; all of them where none is named.

    Raises:
        ConfigError: a name is none of `BUILDERS`.
    """
    for name in names:
        if name not in BUILDERS:
            raise ConfigError("--build-ops", name, f"the ops are {', '.join(BUILDERS)}")
    return list(names or BUILDERS)


def op_status(name: str, folder: Path, reasons: Callable[[str], str]) -> OpStatus:
    """State of one op.

    Args:
        name: of the op.
        folder: from `extensions_folder`.
        reasons: says why an op cannot be built; empty if it can. `obstacle` is the real one.
    """
    if place := shipped(name):
        return OpStatus(name, "built", str(place))
    if (folder / name / f"{name}.so").exists():
        return OpStatus(name, "built", str(folder / name))
    reason = reasons(name)
    if reason:
        return OpStatus(name, "cannot build", reason)
    return OpStatus(name, "can build", f"hpctrain doctor --build-ops {name}")


def obstacle(name: str) -> str:
    """Why this machine cannot build an op; empty if it can."""
    if not shutil.which(os.environ.get("CXX", "c++")):
        return "no C++ compiler: install g++, or load a compiler module"
    if not shutil.which("ninja"):
        return "no ninja: pip install ninja"
    if not _builder_says_yes(name):
        if name == "async_io":
            return "no libaio: install libaio-dev (Debian, Ubuntu) or libaio-devel (Red Hat)"
        return "DeepSpeed finds the compiler, CUDA toolkit or device unfit; DS_ACCELERATOR=cpu asks for the host's op"
    return ""


def _builder_says_yes(name: str) -> bool:
    """Ask DeepSpeed in a process of its own: it prints, and its accelerator is fixed at import."""
    code = f"from deepspeed.ops.op_builder import {BUILDERS[name]} as B; import sys; sys.exit(not B().is_compatible())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def shipped(name: str) -> Path | None:
    """Where an op lies that was compiled when DeepSpeed was installed; None where it was not."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "ops").glob(f"*/{name}_op*.so"), None)


def require_built(name: str, folder: Path, path: str, settle_s: float = 1.0) -> None:
    """Refuse a run whose setting needs an op that cannot be loaded at once.

    Without this DeepSpeed would compile it on every node, or wait for ever for a lock that a killed build has
    left, also where the op is built: loading it takes the lock for a moment. Other ranks may be loading it
    already, so a lock that looks stale is looked at again before it is believed.

    Args:
        name: of the op.
        folder: from `extensions_folder`.
        path: of the setting, which is false.
        settle_s: seconds between the two looks.

    Raises:
        ConfigError: it is not built, or a stale lock lies in its folder.
    """
    if shipped(name):
        return
    built = op_status(name, folder, lambda name: "").state == "built"
    lock = folder / name / "lock"
    mends = [] if built else [f"run hpctrain doctor --build-ops {name} where there is a compiler"]
    if _stays_stale(lock, settle_s):
        mends.insert(0, f"remove the stale build lock {lock} with hpctrain doctor --clean-locks")
    if mends:
        reason = f"needs DeepSpeed's op {name}, which is {'locked' if built else 'not built'}"
        raise ConfigError(path, False, reason, f"{' and '.join(mends)}, or use {path}=true")


def _stays_stale(path: Path, settle_s: float) -> bool:
    def stale() -> tuple[int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        verdict = judge_lock(path, file_system(path.parent)).verdict
        return (found.st_ino, found.st_ctime_ns) if verdict == "stale" else None

    first = stale()
    if first is None:
        return False
    time.sleep(settle_s)
    return stale() == first


@contextmanager
def build_lock(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold our own lock on all builds in a folder.

    Raises:
        LaunchError: another process still holds it after `wait_s` seconds.
    """
    path = folder / "hpctrain" / "build.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with open(path, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    raise LaunchError(
                        f"{path} is held by {holder}, which builds ops: wait for it, or end it; "
                        "the lock goes with its holder."
                    ) from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def build_op(name: str, folder: Path, timeout_s: float, command: Sequence[str] = ()) -> Outcome:
    """Build one op in a process of its own. The caller holds `build_lock`.

    Args:
        name: of the op.
        folder: from `extensions_folder`.
        timeout_s: after which the build and everything it started is killed.
        command: run instead of the build.
    """
    code = f"from deepspeed.ops.op_builder import {BUILDERS[name]} as B; B().load(verbose=True)"
    log = folder / "hpctrain" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    remove_lock(folder / name / "lock")
    start = time.monotonic()
    with open(log, "w") as out:
        process = subprocess.Popen(
            list(command) or [sys.executable, "-c", code], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - start
    if status == 0:
        return Outcome(name, True, seconds, "built", log)
    remove_lock(folder / name / "lock")
    if status is None:
        return Outcome(name, False, seconds, f"not built within {timeout_s:g} s: give it more with --timeout", log)
    lines = log.read_text(errors="replace").strip().splitlines()
    return Outcome(name, False, seconds, lines[-1] if lines else f"exit status {status}", log)


def find_locks(folder: Path, now: float | None = None) -> list[BuildLock]:
    """All build locks in an extension folder, each with a verdict."""
    return [judge_lock(path, file_system(folder), now) for path in sorted(folder.glob("*/lock"))]


def judge_lock(path: Path, file_system: str, now: float | None = None) -> BuildLock:
    """Whether a build holds a lock.

    PyTorch keeps the lock file open while it builds, so on this host the holder can be seen. Where the file
    system is shared with other hosts, only long silence in the build folder speaks for a dead one.
    """
    try:
        owner = path.stat().st_uid
    except OSError:
        return BuildLock(path, "cannot tell", "it has just gone")
    pids = _holders(path)
    if pids is None:
        return BuildLock(path, "cannot tell", "this system has no /proc to look for its holder")
    if pids:
        return BuildLock(path, "in use", f"process {pids[0]} of this host has it open")
    if owner != os.getuid():
        return BuildLock(path, "cannot tell", "it belongs to another user, whose processes are hidden")
    if file_system in NETWORK:
        quiet = (time.time() if now is None else now) - _last_change(path.parent)
        if quiet < QUIET_S:
            return BuildLock(
                path,
                "cannot tell",
                f"another host of this {file_system} may hold it; last change {quiet / 60:.0f} min ago",
            )
        return BuildLock(path, "stale", f"nothing has changed there for {quiet / 3600:.1f} h")
    return BuildLock(path, "stale", "no process has it open")


def clean_locks(folder: Path) -> list[BuildLock]:
    """Remove the locks that are proven stale, and return them.

    Raises:
        LaunchError: a build of ours is running there.
    """
    with build_lock(folder):
        stale = [lock for lock in find_locks(folder) if lock.verdict == "stale"]
        for lock in stale:
            remove_lock(lock.path)
        return stale


def remove_lock(path: Path) -> None:
    """Remove a lock that no build can hold."""
    path.unlink(missing_ok=True)


def _holders(path: Path) -> list[int] | None:
    """Processes of this host that have a file open; None where that cannot be seen."""
    if not Path("/proc/self/fd").is_dir():
        return None
    target, out = os.path.realpath(path), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if any(os.readlink(fd) == target for fd in (entry / "fd").iterdir()):
                    out.append(int(entry.name))
            except OSError:
                continue
    return sorted(out)


def _last_change(folder: Path) -> float:
    """When anything in a folder last changed."""
    times = []
    for path in (folder, *folder.iterdir()):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
