"""Which CPUs each rank of a node gets: those near its GPU, shared evenly, whole cores where that can be told."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.cluster.node import Cpus, Gpu, Node
from hpctrain.layout.layout import split


def cpu_sets(node: Node, gpus: Sequence[int]) -> tuple[Cpus, ...]:
    """CPUs of the ranks of a node, in the order of their GPUs.

    Ranks whose GPUs are near one NUMA node share its CPUs evenly, the first a core more where it does not come out.
    More ranks than cores: all have all of them. NUMA nodes that no GPU is near are left to the system, and those that
    are a GPU's memory have no CPUs. A node without GPUs is shared by all its ranks.

    Args:
        node: with `cores`, where its threads are known.
        gpus: the GPU of each rank, by index.

    Returns:
        of each rank its CPUs; empty where nothing says which are near.
    """
    known = {gpu.index: gpu for gpu in node.gpus}
    everything = _all(node)
    near = [near_cpus(node, known[g]) if g in known else ((-1, everything) if not known else (None, ())) for g in gpus]
    out: list[Cpus] = [()] * len(near)
    for place in dict.fromkeys(near):
        here = [i for i, other in enumerate(near) if other == place]
        cores = _cores(place[1], node.cores)
        for k, i in enumerate(here):
            start, size = split(len(cores), len(here), k)
            mine = cores[start : start + size] if len(cores) >= len(here) else cores
            out[i] = tuple(sorted(cpu for core in mine for cpu in core))
    return tuple(out)


def near_cpus(node: Node, gpu: Gpu) -> tuple[int | None, Cpus]:
    """The NUMA node that a GPU is near, and its CPUs; those that its source names, where that knows no NUMA node.

    Never one that is the memory of a GPU.
    """
    memories = {m for other in node.gpus for m in other.memory}
    found = {numa.index: numa for numa in node.numas if not numa.of_gpu and numa.index not in memories}
    if gpu.numa in found and found[gpu.numa].cpus:
        return gpu.numa, found[gpu.numa].cpus
    own = None if gpu.numa in memories or any(n.of_gpu and n.index == gpu.numa for n in node.numas) else gpu.numa
    if gpu.cpus:
        homes = [numa.index for numa in found.values() if set(gpu.cpus) <= set(numa.cpus)]
        return (homes[0] if len(homes) == 1 else own), gpu.cpus
    with_cpus = [numa for numa in found.values() if numa.cpus]
    if len(with_cpus) == 1 and gpu.numa is None:  # there is no choice
        return with_cpus[0].index, with_cpus[0].cpus
    return own, ()


def _all(node: Node) -> Cpus:
    return tuple(sorted({cpu for numa in node.numas if not numa.of_gpu for cpu in numa.cpus}))


def _cores(cpus: Cpus, told: Sequence[Cpus]) -> list[Cpus]:
    """CPUs by core. Where nobody says, two runs of equal length and step are taken for the first and the second
    threads: 0-7,16-23 on a machine that numbers sockets one after the other. One that numbers them in turn has
    0,2,..,30 here, of which the upper half may be second threads, and is no worse off if it is not."""
    if told:
        allowed = set(cpus)
        cores = [tuple(c for c in core if c in allowed) for core in told]
        known = {c for core in cores for c in core}
        return sorted([core for core in cores if core] + [(c,) for c in cpus if c not in known])
    half = len(cpus) // 2
    first, second = cpus[:half], cpus[half:]
    step = cpus[1] - cpus[0] if half > 1 else 1
    runs = half > 0 and len(second) == half and all(r == tuple(range(r[0], r[-1] + 1, step)) for r in (first, second))
    if runs and (step > 1 or second[0] != first[-1] + 1):
        return list(zip(first, second))
    return [(c,) for c in cpus]
