"""The library that binds connections to a rail (`railbind.c`), made when a lab comes up where there is a C compiler.

There is no way around the compiler: gloo connects in C++, out of Python's reach.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import LabError
from hpctrain.lab import machines
from hpctrain.lab.requirements import PATH
from hpctrain.lab.spec import LabSpec

SOURCE = Path(__file__).with_name("railbind.c")
TIMEOUT_S = 60.0


def build(spec: LabSpec) -> None:
    """Make it if the machine can. The lab is whole without it."""
    compiler = shutil.which("cc", path=PATH)
    if not compiler:
        return
    spec.railbind.parent.mkdir(exist_ok=True)
    with spec.log("railbind").open("w") as log:
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(spec.railbind), str(SOURCE), "-ldl"]
        subprocess.run(command, env={"PATH": PATH}, stdout=log, stderr=log, timeout=TIMEOUT_S)


def obstacle(spec: LabSpec) -> str | None:
    """Why connections cannot be bound to a rail, as a sentence; None if they can."""
    if spec.railbind.exists():
        return None
    log = spec.log("railbind")
    if not log.exists():
        return "connections cannot be bound to a rail before apt-get install gcc libc6-dev and a new lab."
    return f"the library that binds connections to a rail cannot be made: {machines.last_words(log)}"


def environment(spec: LabSpec) -> Mapping[str, str]:
    """What a process has to be started with, so that its connections go where RAILBIND says, an address of a rail.

    Raises:
        LabError: there is no library.
    """
    if said := obstacle(spec):
        raise LabError(said)
    return {"LD_PRELOAD": str(spec.railbind)}
