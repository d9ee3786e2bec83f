"""One operation of a rank on buffers of its own: its call, what is in the buffers, and whether that is right."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.comms.algorithms import algorithm
from hpctrain.comms.backend import IN, Act, Fault, Group, Party, Task
from hpctrain.comms.buffers import Buffers, allocate, fill, wrong
from hpctrain.comms.formulas import OPERATIONS, counts
from hpctrain.comms.pattern import Contents, Matrix, Values, busiest, contents, scaled, skewed, values
from hpctrain.comms.sizes import DTYPES
from hpctrain.comms.spec import Spec, weights_of


@dataclass(frozen=True)
class Test:
    """What is measured: one line of the table, in each of the groups."""

    operation: str
    size: int
    dtype: str
    reduction: str
    algorithm: str
    placement: str

    @property
    def repeats(self) -> bool:
        """Whether the operation, done again, leaves what it has left before: not where a sum takes the place of what it
        is of."""
        return not (self.placement == IN and OPERATIONS[self.operation].reduces)


@dataclass(frozen=True)
class Trial:
    """What a rank does in a test.

    Attributes:
        act: the operation, once.
        barrier: of the ranks of the group.
        size: S, bytes.
    """

    party: Party
    task: Task
    act: Act
    barrier: Act
    size: int
    inside: Contents
    what: Values

    def fill(self) -> None:
        """Put the pattern into what is sent."""
        fill(self.task.buffers, self.inside, self.what, self.party.memory)

    def wrong(self, fault: Fault | None) -> int:
        """Elements of the result that are not what they have to be."""
        buffers = self.task.buffers
        if fault is not None and self.inside.receives and fault.strikes(self.party.rank, self.size):
            buffers.receive[self.inside.receives // 2] += 1
        return wrong(buffers.receive, self.inside.receive, self.what, buffers.dtype, self.party.memory)


def trial(spec: Spec, party: Party, group: Group, test: Test) -> Trial:
    """That of a rank of a group.

    Raises:
        ConfigError: the backend has no such operation, dtype or reduction.
    """
    n, index = len(group.ranks), group.index
    width, root = DTYPES[test.dtype][1], spec.root
    found = counts(test.operation, test.size, n, width)
    matrix: Matrix = ()
    size = found.size
    if test.operation == "all_to_all_v":
        matrix = scaled(weights_of(spec.weights, n) if spec.weights else skewed(n), test.size, width)
        size = busiest(matrix) * width
    inside = contents(test.operation, found.count, n, index, root, matrix)
    buffers = allocate(test.operation, inside, index, root, test.placement == IN, test.dtype, party.memory)
    task = Task(test.operation, buffers, found.count, test.reduction, root, matrix)
    if test.algorithm:
        act = algorithm(test.algorithm, group, task, party.memory, _inner(group, party))
    else:
        act = group.call(task)
    what = values(test.operation, test.dtype, test.reduction, n)
    return Trial(party, task, act, group.call(_barrier(party)), size, inside, what)


def _barrier(party: Party) -> Task:
    none = party.memory.zeros(0, "uint8")
    return Task("barrier", Buffers(none, none, "uint8"), 0)


def _inner(group: Group, party: Party) -> int:
    """Ranks of the group on each node; 0 if they are not equally many, or not side by side."""
    own = [party.hosts[rank] for rank in group.ranks]
    sizes = {own.count(host) for host in own}
    inner = sizes.pop()
    in_blocks = all(len(set(own[i : i + inner])) == 1 for i in range(0, len(own), inner))
    return inner if not sizes and in_blocks else 0
