"""ZeRO-3's partitions of weights on a disk, in the place of DeepSpeed's `AsyncPartitionedParameterSwapper`.

DeepSpeed's own keeps partitions under 1 MiB in memory and, by default (`max_in_cpu`), those of a billion elements
besides; every buffer of it is as large as the largest partition; it ends the run when modules are fetched in another
order than the one it prefetched for, as in an evaluation or a pipeline; and its I/O is not checked. Here every
partition that is not to stay gathered has a place on the disk or, as `share` says, in memory; buffers are as large as
what is in them; and what is read ahead is what came next in the step before, which costs a read where it is not so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.layout.slots import UNIT
from hpctrain.parallel.pages import aligned, view_bytes
from hpctrain.scratch import Disk, ScratchFile, Transfer
from hpctrain.sharding.deepspeed.patches import require_source

Key = tuple[int, ...]
"""What a module fetches at once: ids of parameters."""


@dataclass
class _Held:
    """A partition in memory, or on its way there."""

    buffer: Tensor
    transfer: Transfer | None


class WeightsOnDisk:
    """See the module's docstring. Methods that DeepSpeed calls have its names.

    Args:
        file: has room for all partitions, each rounded up to `UNIT`.
        disk: moves them.
        dtype: of the weights.
        least: elements of the largest partition of parameters that stay gathered; those go nowhere.
        share: of the other elements that go to the disk.
        ahead: bytes that may be read before they are asked for.
        pinned: lock the pages of buffers.
        copied: weights are computed with in a copy of what is read: gathered, or on another device. Where not, a
            buffer is not used again: what is recomputed keeps its memory for backward, whatever becomes of the weight.
    """

    def __init__(
        self,
        file: ScratchFile,
        disk: Disk,
        dtype: torch.dtype,
        least: int,
        share: float,
        ahead: int,
        pinned: bool,
        copied: bool,
    ) -> None:
        self._file, self._disk, self._dtype, self._least, self._share = file, disk, dtype, least, share
        self._ahead_limit, self._pinned, self._copied = ahead, pinned, copied
        self._offsets: dict[int, tuple[int, int]] = {}
        self._seen = self._far = self._end = 0
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)
        self._held: dict[int, _Held] = {}
        self._ahead: dict[int, _Held] = {}
        self._writing: list[tuple[Tensor, Transfer]] = []
        self._filled: set[int] = set()
        self._before: list[Key] = []
        self._now: list[Key] | None = None
        self._same = False

    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Whether the next partition goes to the disk; asked once for each."""
        assert numel is not None, param
        if numel <= self._least:
            return False
        self._seen += numel
        far = self._far + numel / 2 <= self._share * self._seen
        self._far += far * numel
        return far

    def get_buffer(self, param: Any, numel: int) -> Tensor:
        """Memory for a new partition, and its place on the disk."""
        padded = -(-numel // UNIT) * UNIT
        self._offsets[param.ds_id] = self._end, numel
        self._end += padded * self._dtype.itemsize
        assert self._end <= self._file.size, (self._end, self._file.size)
        held = self._held[param.ds_id] = _Held(self._take(padded), None)
        return held.buffer[:numel]

    def swap_out_and_release(self, params: Sequence[Any], *_: Any, **__: Any) -> None:
        """A new partition goes. It is empty (`initial.py`): its values come with `put`."""
        self.remove_partition_and_release_buffers(params)

    def begin_step(self) -> None:
        """The requests of a step begin; begin to read what came first in the last one."""
        self.synchronize_writes()
        self._before, self._now, self._same = self._now or self._before, [], True
        self._read_ahead()

    def end_step(self) -> None:
        """They end: weights will be other ones, and what an evaluation asks for is no hint for the next step."""
        self._before, self._now = self._now or self._before, None
        for key in list(self._ahead):
            self._drop(key)

    def swap_in(self, params: Sequence[Any], *_: Any, **__: Any) -> None:
        """Bring partitions into memory, and begin to read what came after them the last time."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        self.synchronize_writes()
        for param in params:
            held = self._ahead.pop(param.ds_id, None) or self._begin(param.ds_id)
            self._held[param.ds_id] = held
        for param in params:
            held = self._held[param.ds_id]
            if held.transfer is not None:
                held.transfer.wait()
            param.ds_tensor.data = held.buffer[: self._offsets[param.ds_id][1]]
            param.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        if self._now is not None:
            asked, at = tuple(sorted(param.ds_id for param in params)), len(self._now)
            self._same &= at < len(self._before) and self._before[at] == asked
            self._now.append(asked)
            self._read_ahead()

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Let partitions go that are on the disk."""
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

        for param in params:
            held = self._held.pop(param.ds_id, None)
            if held is not None and self._copied:
                self._give(held.buffer)
            param.ds_tensor.data = torch.empty(0, dtype=self._dtype)
            param.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def available_swap_in_buffers(self) -> int:
        """None for DeepSpeed's own prefetching, which goes by a trace that pipelines and evaluations break."""
        return 0

    def synchronize_reads(self) -> None:
        """`swap_in` has waited."""

    def synchronize_writes(self) -> None:
        """Wait until all values are on the disk."""
        for buffer, transfer in self._writing:
            transfer.wait()
            self._give(buffer)
        self._writing.clear()

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Buffers for writing are taken when something is written."""

    def holds(self, parameter: Any) -> bool:
        """Whether a parameter's partition is on the disk."""
        return parameter.ds_id in self._offsets

    def put(self, parameter: Any, start: int, values: Tensor) -> None:
        """Write a stretch of a partition.

        Args:
            start: a multiple of `UNIT`.
            values: in any precision, [n]; to a multiple of `UNIT` or to the partition's end.
        """
        self._drop(parameter.ds_id)
        padded = -(-values.numel() // UNIT) * UNIT
        buffer = self._take(padded)
        buffer[: values.numel()].copy_(values)
        buffer[values.numel() :].zero_()
        offset = self._offsets[parameter.ds_id][0] + start * self._dtype.itemsize
        if len(self._writing) >= WRITES:
            oldest, transfer = self._writing.pop(0)
            transfer.wait()
            self._give(oldest)
        self._writing.append((buffer, self._disk.write(self._file, offset, view_bytes(buffer))))

    def held_bytes(self) -> int:
        """Memory in use for partitions and on its way."""
        kept = [h.buffer for h in (*self._held.values(), *self._ahead.values())]
        kept += [b for b, _ in (*self._writing, *(pair for some in self._free.values() for pair in some))]
        return sum(b.numel() * b.element_size() for b in kept)

    def close(self) -> None:
        """Wait for what is on its way, and give memory and disk back."""
        for held in self._ahead.values():
            assert held.transfer
            held.transfer.wait()
        self.synchronize_writes()
        for kept in (self._ahead, self._held, self._free):
            kept.clear()
        self._file.close()

    def _begin(self, key: int) -> _Held:
        offset, numel = self._offsets[key]
        buffer = self._take(-(-numel // UNIT) * UNIT)
        return _Held(buffer, self._disk.read(self._file, offset, view_bytes(buffer)))

    def _read_ahead(self) -> None:
        """Begin with what came after these requests in the step before, as much as there is room for."""
        assert self._now is not None
        wanted: list[int] = []
        at, room = len(self._now), self._ahead_limit
        while self._same and at < len(self._before):
            following = self._before[at]
            room -= sum(self._nbytes(key) for key in following)
            if room < 0:
                break
            wanted += [key for key in following if key not in self._held and key not in wanted]
            at += 1
        for key in [key for key in self._ahead if key not in wanted]:
            self._drop(key)
        for key in wanted:
            if key not in self._ahead:
                self._ahead[key] = self._begin(key)

    def _drop(self, key: int) -> None:
        """Forget what was prefetched."""
        held = self._ahead.pop(key, None)
        if held is not None and held.transfer is not None:
            held.transfer.wait()
            self._give(held.buffer)

    def _nbytes(self, key: int) -> int:
        return -(-self._offsets[key][1] // UNIT) * UNIT * self._dtype.itemsize

    def _take(self, numel: int) -> Tensor:
        if not self._free[numel]:
            return aligned(numel * self._dtype.itemsize, self._pinned).view(self._dtype)
        buffer, used = self._free[numel].pop()
        if used is not None:
            used.synchronize()
        return buffer

    def _give(self, buffer: Tensor) -> None:
        """A GPU may still have to copy from it: what it was told until now has to be done first."""
        used = torch.cuda.current_stream().record_event() if self._pinned else None
        self._free[buffer.numel()].append((buffer, used))


WRITES = 4
"""Stretches that are written at the same time."""


@contextmanager
def in_place_of_deepspeeds(weights: WeightsOnDisk | None) -> Iterator[None]:
    """While this holds, an engine that is made keeps its weights where they are told."""
    from deepspeed.runtime.zero import partition_parameters as module

    original = module.AsyncPartitionedParameterSwapper
    require_source(module.Init.__init__, "AsyncPartitionedParameterSwapper(_ds_config, self.dtype)")
    require_source(module.Init._partition_param, "buffer = self.param_swapper.get_buffer(param, partition_size)")
    module.AsyncPartitionedParameterSwapper = lambda *_: weights
    try:
        yield
    finally:
        module.AsyncPartitionedParameterSwapper = original
