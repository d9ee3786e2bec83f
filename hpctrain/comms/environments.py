"""Variables by which NCCL and MPI libraries take another algorithm, and sweeps over them.

NCCL: `NCCL_ALGO` and `NCCL_PROTO` (NCCL user guide, "Environment Variables"). Open MPI: `coll_tuned_*_algorithm` with
`coll_tuned_use_dynamic_rules` (`ompi_info --param coll tuned --level 9`). MPICH:
`MPIR_CVAR_*_INTRA_ALGORITHM` (its `mpivars`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from hpctrain.errors import ConfigError

NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree")
NCCL_PROTOCOLS = ("LL", "LL128", "Simple")
NCCL_HAS = {"all_reduce": NCCL_ALGORITHMS, **dict.fromkeys(("all_gather", "reduce_scatter"), ("Ring", "NVLS"))}
"""Algorithms by operation; others have Ring alone. What a machine cannot do, NCCL refuses when the ranks meet."""

OPEN_MPI = {
    "all_reduce": (
        "allreduce",
        ("basic_linear", "nonoverlapping", "recursive_doubling", "ring", "segmented_ring", "rabenseifner"),
    ),
    "all_gather": ("allgather", ("linear", "bruck", "recursive_doubling", "ring", "neighbor", "sparbit")),
    "all_to_all": ("alltoall", ("linear", "pairwise", "modified_bruck", "linear_sync")),
    "broadcast": (
        "bcast",
        (
            *("basic_linear", "chain", "pipeline", "split_binary_tree", "binary_tree", "binomial", "knomial"),
            *("scatter_allgather", "scatter_allgather_ring"),
        ),
    ),
    "reduce": ("reduce", ("linear", "chain", "pipeline", "binary", "binomial", "in-order_binary", "rabenseifner")),
    "barrier": ("barrier", ("linear", "double_ring", "recursive_doubling", "bruck", "tree")),
}
"""By Open MPI's own names (5.0.11), but for those for two ranks alone."""

MPICH = {
    "all_reduce": ("ALLREDUCE", ("recursive_doubling", "reduce_scatter_allgather", "ring", "tree")),
    "all_gather": ("ALLGATHER", ("brucks", "recursive_doubling", "ring")),
    "all_to_all": ("ALLTOALL", ("brucks", "pairwise", "scattered")),
    "broadcast": (
        "BCAST",
        ("binomial", "scatter_recursive_doubling_allgather", "scatter_ring_allgather", "pipelined_tree"),
    ),
    "reduce": ("REDUCE", ("binomial", "reduce_scatter_gather")),
}

Sweep = tuple[str, dict[str, str]]
"""What is different, in words; and the variables."""


def sweeps(backend: str, operations: Sequence[str], given: Sequence[str], library: bool) -> Iterator[Sweep]:
    """All combinations of what is to vary; one of nothing if nothing is.

    Args:
        given: `NAME=V1,V2`.
        library: the algorithms of the backend's library too.

    Raises:
        ConfigError: not of that form, or a backend or operations that have no choice.
    """
    axes: list[list[Sweep]] = []
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier() or not values:
            raise ConfigError("--sweep-env", text, "must be NAME=V1,V2")
        axes.append([(f"{name}={value}", {name: value}) for value in values.split(",")])
    if library:
        axes.append(list(_of_library(backend, operations)))
    for several in itertools.product(*axes):
        merged: dict[str, str] = {}
        for _, variables in several:
            merged |= variables
        yield " ".join(label for label, _ in several), merged


def _of_library(backend: str, operations: Sequence[str]) -> Iterator[Sweep]:
    if backend == "nccl":
        names = dict.fromkeys(name for op in operations for name in NCCL_HAS.get(op, ("Ring",)))
        for algorithm, protocol in itertools.product(names, NCCL_PROTOCOLS):
            yield f"NCCL_ALGO={algorithm} NCCL_PROTO={protocol}", {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol}
        return
    if backend != "mpi" or len(operations) > 1 or operations[0] not in OPEN_MPI:
        raise ConfigError(
            "--library-algorithms",
            ",".join(operations),
            f"{backend} has no choice of algorithms for it",
            f"use --backend nccl, or mpi with one of {', '.join(OPEN_MPI)}; --algorithm has ours",
        )
    yield from open_mpi(operations[0]) if _is_open_mpi() else mpich(operations[0])


CHOOSING = ("NCCL_ALGO", "NCCL_PROTO", "OMPI_MCA_coll", "MPIR_CVAR_", "I_MPI_ADJUST")
"""Beginnings of variables that choose algorithms."""


def chosen(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of the variables that choose algorithms."""
    return {name: value for name, value in variables.items() if name.startswith(CHOOSING)}


def open_mpi(operation: str) -> Iterator[Sweep]:
    """Algorithms of Open MPI."""
    name, algorithms = OPEN_MPI[operation]
    for algorithm in algorithms:
        chosen = {f"OMPI_MCA_coll_tuned_{name}_algorithm": algorithm, "OMPI_MCA_coll_tuned_use_dynamic_rules": "1"}
        # Components of a higher priority would take the operation from `tuned`.
        yield f"Open MPI {algorithm}", {**chosen, "OMPI_MCA_coll": "^han,adapt,sm,xhc,acoll,ucc,hcoll"}


def mpich(operation: str) -> Iterator[Sweep]:
    """Algorithms of MPICH, and of libraries made of it."""
    if operation not in MPICH:
        raise ConfigError("--library-algorithms", operation, f"MPICH has a choice for {', '.join(MPICH)}", "use one")
    name, algorithms = MPICH[operation]
    for algorithm in algorithms:
        # Unless it is told to fall back, MPICH ends where an algorithm does not fit.
        yield (
            f"MPICH {algorithm}",
            {
                f"MPIR_CVAR_{name}_INTRA_ALGORITHM": algorithm,
                "MPIR_CVAR_COLLECTIVE_FALLBACK": "print",
            },
        )


def _is_open_mpi() -> bool:
    import subprocess

    from hpctrain.comms.local import mpirun

    said = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, timeout=60).stdout
    return "Open MPI" in said or "Open RTE" in said
