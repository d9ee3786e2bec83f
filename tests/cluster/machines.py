"""Matrices of `nvidia-smi topo -m` made to order, clean or worn as they arrive in practice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Machine:
    """What a matrix is to show.

    Attributes:
        link: cell of two GPUs, by their indices.
        reach: cell of a GPU and a NIC.
        beside: cell of two NICs.
        affinity: what stands after the cells of a GPU: CPUs, NUMA nodes, GPU NUMA ID.
        legend: names of NICs.
    """

    gpus: int
    nics: int = 0
    link: Callable[[int, int], str] = lambda a, b: "NV18"
    reach: Callable[[int, int], str] = lambda g, n: "NODE"
    beside: Callable[[int, int], str] = lambda a, b: "NODE"
    affinity: Callable[[int], Sequence[str]] = lambda g: ("0-31", "0", "N/A")
    names: Sequence[str] = ()
    legend: Sequence[str] = field(default_factory=list)

    def rows(self) -> list[list[str]]:
        """Cells of the table, the header first, affinities as the last cells of rows of GPUs."""
        columns = [f"GPU{g}" for g in range(self.gpus)] + (list(self.names) or [f"NIC{n}" for n in range(self.nics)])
        table = [["", *columns, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]]
        for i, name in enumerate(columns):
            table.append([name, *(self.cell(i, j) for j in range(len(columns)))])
            if i < self.gpus:
                table[-1] += self.affinity(i)
        return table

    def cell(self, i: int, j: int) -> str:
        if i == j:
            return "X"
        if i < self.gpus and j < self.gpus:
            return self.link(min(i, j), max(i, j))
        if i >= self.gpus and j >= self.gpus:
            return self.beside(*sorted((i - self.gpus, j - self.gpus)))
        return self.reach(min(i, j), max(i, j) - self.gpus)

    def tail(self) -> str:
        said = "\n".join(f"  NIC{i}: {name}" for i, name in enumerate(self.legend))
        return "\nLegend:\n\n  X    = Self\n  PIX  = Connection traversing at most a single PCIe bridge\n" + (
            f"\nNIC Legend:\n\n{said}\n" if said else ""
        )

    def tabbed(self) -> str:
        """As `nvidia-smi` prints it: tabs, two of them before the last affinity."""
        header, *rows = self.rows()
        count = len(header) - 3
        lines = ["\t" + "\t".join(header[1:])]
        for name, *cells in rows:
            after = cells[count - 1 :]
            text = "\t".join([name, *(" X " if c == "X" else c for c in cells[: count - 1])])
            lines.append(text + "\t" + ("\t".join(after[:2]) + "\t\t" + after[2] if after else "\t\t\t"))
        return "\n".join(lines) + "\n" + self.tail()

    def spaced(self, indent: str = "") -> str:
        """As terminals and web pages leave it: columns of eight, tabs gone, the CPUs as wide as they are."""
        lines = []
        for name, *cells in self.rows():
            lines.append(
                indent + (name.ljust(8) + "".join(c.ljust(8) + ("  " if len(c) > 7 else "") for c in cells)).rstrip()
            )
        return "\n".join(lines) + "\n" + self.tail()

    def markdown(self) -> str:
        header, *rows = self.rows()
        count = len(header) - 3
        lines = ["| " + " | ".join(header[:count]) + " |", "|" + "---|" * count]
        lines += ["| " + " | ".join(row[:count]) + " |" for row in rows]
        return "\n".join(lines) + "\n"


def socket(g: int, half: int = 4) -> int:
    return g // half


def two_sockets(g: int) -> tuple[str, str, str]:
    """Affinities of eight GPUs on two sockets with threads."""
    return (("0-55,112-167", "0", "N/A"), ("56-111,168-223", "1", "N/A"))[socket(g)]


def railed(gpus: int = 8, extra: int = 0, order: Sequence[int] | None = None, **more: object) -> Machine:
    """A node with a NIC at PIX for each GPU, in an order, and further NICs at NODE of the second socket."""
    place = list(order or range(gpus))

    def reach(g: int, n: int) -> str:
        if n >= gpus:
            return "NODE" if socket(g) == 1 else "SYS"
        if place[g] == n:
            return "PIX"
        return "NODE" if socket(g) == socket(place.index(n)) else "SYS"

    settings: dict[str, object] = {"reach": reach, "affinity": two_sockets, "legend": [], **more}
    return Machine(gpus, gpus + extra, **settings)  # type: ignore[arg-type]
