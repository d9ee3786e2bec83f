"""What a library of MPI needs of those who call it."""

from __future__ import annotations

import time
from typing import Any

SETTLE_S = 0.5


def settle(mpi: Any) -> None:
    """Let the other ranks come out of MPI_Init, too, before they are sent anything.

    Ranks of Open MPI 5 come out one after the other, and those that are still inside know no MPI_COMM_WORLD yet: a
    message for it ends them by a segmentation fault (open-mpi/ompi, issue 12495). Nothing tells who is out.

    Args:
        mpi: the module `mpi4py.MPI`, just initialized.
    """
    if mpi.Get_library_version().startswith("Open MPI v5.") and mpi.COMM_WORLD.Get_size() > 1:
        time.sleep(SETTLE_S)
