"""What a library of MPI needs of those who call it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain import mpi


@pytest.mark.parametrize(
    ("library", "ranks", "waits"),
    [
        ("Open MPI v5.0.11, package: Open MPI", 16, [mpi.SETTLE_S]),
        ("Open MPI v5.0.11, package: Open MPI", 1, []),
        ("Open MPI v4.1.4, package: Debian OpenMPI", 16, []),
        ("MPICH Version:      4.3.0", 16, []),
    ],
)
def test_only_ranks_of_open_mpi_5_wait_for_each_other(
    library: str, ranks: int, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    world = SimpleNamespace(Get_size=lambda: ranks)
    mpi.settle(SimpleNamespace(Get_library_version=lambda: library, COMM_WORLD=world))
    assert waited == waits
