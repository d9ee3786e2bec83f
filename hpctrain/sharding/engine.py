"""The interface of a sharding engine, and the choice of one.

An engine owns a rank's master weights, optimizer state and the data-parallel reduction of its chunks (the
parts of the model that the rank holds: one, or several under an interleaved pipeline).

A step is: `begin_step` once; for every micro-batch `forward` and later `backward`, in any order the schedule
asks for; `step` once. Losses are sums over tokens; the divisor is the number of valid tokens of the whole
global batch, known before the first backward, and applied in exactly one place: `Engine.backward`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hpctrain.model.batch import Batch
from hpctrain.parallel.ticket import Ticket
from hpctrain.sharding.state import Piece, StateReader


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimizer step, the same on every rank.

    Attributes:
        grad_norm: global norm before clipping, every logical parameter counted once; NaN if it was not finite.
        skipped: the loss or the gradient was not finite; nothing was changed.
        backed_off: it was skipped because the loss scale was too large, and the scale was lowered: a matter of
            course in fp16, and no sign of trouble.
    """

    grad_norm: float
    skipped: bool
    backed_off: bool = False


class Engine(ABC):
    """See the module's docstring. `chunks` are the parallelized modules, in the order of the model."""

    chunks: Sequence[nn.Module]

    @abstractmethod
    def begin_step(self, valid_tokens: int, micro_batches: int) -> None:
        """Start a step of `micro_batches` backward passes a chunk over `valid_tokens` tokens of all ranks."""

    @abstractmethod
    def forward(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Ticket:
        """Run a chunk on one micro-batch, for training. `hidden` and `tied` as for `Transformer.forward`."""

    @abstractmethod
    def backward(self, ticket: Ticket, grad: Tensor | None = None) -> None:
        """Backward of one forward. `grad` is the output's gradient; None on the last stage, whose output is a
        sum of losses and is divided here by the step's valid tokens."""

    def backward_input(self, ticket: Ticket, grad: Tensor | None = None) -> Callable[[], None]:
        """As much of a backward as the stage before waits for. Returns the rest, to be called once before `step`.

        Engines that take gradients in hooks of a whole backward do without; `hpctrain.config.validate` refuses
        schedules that split for them.
        """
        raise AssertionError("this engine does not split backwards")

    @abstractmethod
    def step(self, lr: float, loss_finite: bool = True) -> StepResult:
        """Finish the reduction, clip, update. All ranks agree on the result.

        Args:
            lr: learning rate of this step.
            loss_finite: whether the step's loss was finite, the same on all ranks; if not, the step is skipped
                whatever its gradient.
        """

    @abstractmethod
    def evaluate(self, chunk: int, batch: Batch, hidden: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        """Run a chunk without gradients."""

    @abstractmethod
    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of a chunk that the model computes with, into which autograd accumulates."""

    def with_gradient(self, name: str, grad: Tensor, more: Tensor) -> Tensor:
        """What autograd is to accumulate for a parameter in a step's last backward, which has made `grad`, where there
        is `more` of it, in master precision, from elsewhere. Here their sum, rounded once to the precision of `grad`.
        """
        return (grad.to(more.dtype) + more).to(grad.dtype)

    @abstractmethod
    def values(self, name: str) -> Tensor:
        """Its values, whole even where they are sharded between uses: a detached tensor. Collective over dp x cp."""

    @abstractmethod
    def pieces(self) -> Iterable[Piece]:
        """The state this rank has to write. Over all ranks every element of every tensor appears once."""

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """Numbers that belong to the state: `step`, the count of updates made; where the loss scale is dynamic also
        `loss_scale` and `loss_scale_good_steps`, the steps since it last changed."""

    @abstractmethod
    def load(self, reader: StateReader) -> None:
        """Take weights, moments and scalars from a checkpoint of any layout or engine."""

    def close(self) -> None:
        """Let go of what outlives the object (hooks, files)."""
