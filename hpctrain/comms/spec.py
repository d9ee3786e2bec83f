"""What is to be measured, as plain settings that travel to the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.comms.formulas import ALGORITHMS as OURS
from hpctrain.comms.formulas import OPERATIONS
from hpctrain.comms.sizes import DTYPES, REDUCTIONS
from hpctrain.comms.timing import AVERAGES, Stop
from hpctrain.errors import ConfigError

BACKENDS = ("nccl", "gloo", "mpi")


@dataclass(frozen=True)
class Spec:
    """One measurement.

    Attributes:
        kind: one of `kinds.KINDS`.
        backend: one of `BACKENDS`.
        operations: keys of `OPERATIONS`.
        sizes: S, bytes.
        dtypes, reductions: of elements.
        groups: names, as `groups.groups` takes them.
        layout: of the axes, as `tp=2,dp=4`.
        fabric: file of it, for leaves.
        root: index in each group.
        weights: of all_to_all_v, rows with `/` between; "": skewed.
        warm_up: iterations that do not count.
        iterations: counted ones.
        confidence: the median is to be known so well, with 95 % confidence; None: a count.
        checks: results that are checked, of every size and placement.
        barrier: all ranks begin every iteration together.
        graph: on CUDA, iterations of one captured graph; 0: none.
        average: as nccl-tests' -a.
        algorithms: of ours, or "" for the backend's own.
        searches: for who is slow, one after the other.
        expected: what a pair is to reach each way, GB/s; 0: as much as others do.
        alone: groups of a kind run one after the other.
        timeout_s: of every wait: for one iteration, or for the ranks to meet.
        threads: of a rank; 0: its CPUs over the ranks that share them.
        recipe: of a mix, a RunConfig as plain data.
        environ: variables that each rank sets before it begins; {rank}, {local_rank} and {address:INTERFACE} stand for
            its own.
        fault: damage on purpose, for tests, as `backend.Fault` takes it.
        note: in the words of who measures.
    """

    kind: str = "collectives"
    backend: str = "gloo"
    operations: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (1 << 20,)
    dtypes: tuple[str, ...] = ("float32",)
    reductions: tuple[str, ...] = ("sum",)
    groups: tuple[str, ...] = ("world",)
    layout: str = ""
    fabric: str = ""
    root: int = 0
    weights: str = ""
    warm_up: int = 5
    iterations: int = 20
    confidence: float | None = None
    checks: int = 1
    barrier: bool = False
    graph: int = 0
    average: str = "mean"
    algorithms: tuple[str, ...] = ("",)
    searches: int = 1
    expected: float = 0.0
    alone: bool = False
    timeout_s: float = 60.0
    threads: int = 0
    recipe: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    fault: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        _one_of("--backend", (self.backend,), BACKENDS)
        _one_of("--op", self.operations, tuple(OPERATIONS))
        _one_of("--dtype", self.dtypes, tuple(DTYPES))
        _one_of("--redop", self.reductions, REDUCTIONS)
        _one_of("--average", (self.average,), AVERAGES)
        _one_of("--algorithm", self.algorithms, ("", *OURS))
        if "avg" in self.reductions and any("int" in name for name in self.dtypes):
            raise ConfigError("--redop", "avg", "a mean of whole numbers is none", "use a float dtype")
        ours = ",".join(filter(None, self.algorithms))
        if ours and set(self.operations) != {"all_reduce"}:
            others = ", ".join(name for name in self.operations if name != "all_reduce")
            raise ConfigError("--algorithm", ours, f"is for all_reduce, not for {others}", "leave one of them out")
        if ours and "avg" in self.reductions:
            raise ConfigError("--redop", "avg", "algorithms of ours have sum, prod, max, min", "use one of these")
        if self.graph and self.backend != "nccl":
            raise ConfigError("--graph", self.graph, "graphs are CUDA's", "use --backend nccl")
        if self.graph and "barrier" in self.operations:
            raise ConfigError(
                "--graph", self.graph, "a barrier waits on the CPU, which no graph has", "leave it out of --op"
            )

    @property
    def stop(self) -> Stop:
        """When there are enough iterations."""
        return Stop(self.iterations, self.confidence)

    def plain(self) -> dict[str, Any]:
        """As JSON has it: lists for tuples."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def of(plain: dict[str, Any]) -> Spec:
        """The inverse of `plain`."""
        kept: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in plain.items()}
        return Spec(**kept)


def _one_of(flag: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise ConfigError(flag, value, f"must be one of {', '.join(filter(None, allowed))}")


def weights_of(text: str, ranks: int) -> tuple[tuple[float, ...], ...]:
    """The matrix of all_to_all_v in a text: numbers with blanks or commas between, a row a line or `/`.

    Raises:
        ConfigError: it is not square, not of that many ranks, or has nothing in it.
    """
    rows = [row.replace(",", " ").split() for row in text.replace("/", "\n").splitlines() if row.strip()]
    try:
        made = tuple(tuple(float(cell) for cell in row) for row in rows)
    except ValueError:
        made = ()
    fits = len(made) == ranks and all(len(row) == ranks and min(row) >= 0 for row in made)
    if not fits or not any(map(any, made)):
        raise ConfigError("--matrix", text[:40], f"must be {ranks} rows of {ranks} numbers of at least 0, not all 0")
    return made
