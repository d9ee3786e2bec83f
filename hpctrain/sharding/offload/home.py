"""The memory and the files of one rank in which offloaded state lives."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Mapping, Sequence

import torch

from hpctrain.config.schema import OffloadConfig, RunConfig
from hpctrain.errors import ConfigError
from hpctrain.layout.offload import RECORD, DiskRates, Sizes, sizes_for
from hpctrain.layout.placement import Placement
from hpctrain.layout.slots import Row
from hpctrain.parallel.mesh import Mesh
from hpctrain.parallel.pages import Buffers
from hpctrain.scratch import Disk, ScratchFile
from hpctrain.sharding.offload.gradients import Gradients
from hpctrain.sharding.offload.states import BYTES, Far, States
from hpctrain.sharding.state import KINDS
from hpctrain.telemetry.disk import disk_rates
from hpctrain.telemetry.memory import available_memory, return_freed_memory

ROOMY = 3
"""How many times a rank's state its memory holds where there is enough."""


def make_home(config: RunConfig, mesh: Mesh, records: Mapping[str, Placement]) -> Home:
    """The home of a rank's state, in pieces that suit the model, the disk and what memory there is.

    Args:
        config: of the run.
        mesh: this rank's view of all ranks.
        records: placements of the parameters that the rank keeps state of.

    Raises:
        ConfigError: the disk cannot be used.
    """
    settings = config.sharding.offload
    rates = disk_rates(settings.folder) if settings.on_disk else DiskRates(0.0, 0.0)
    host = available_memory(torch.device("cpu")).bytes // config.cluster.gpus_per_node
    held = [-(-math.prod(r.local_shape) // mesh.reduction(r).size) for r in records.values()]
    if is_short(host, held):
        return_freed_memory()
    return Home(settings, sizes_for(config, held, rates, host), mesh.device, rates, host)


def is_short(host: int, held: Sequence[int]) -> bool:
    """Whether a rank has so little memory that what is freed must go back to the system at once.

    That costs: pages are cleared each time they are given out again (docs/offload.md).

    Args:
        host: bytes that the rank may take.
        held: elements of each parameter that it keeps state of.
    """
    return host < ROOMY * RECORD * sum(held)


class Home:
    """See the module's docstring.

    Args:
        settings: what goes where.
        sizes: of chunks, blocks and buffers.
        device: where the rank computes.
        rates, host: of the disk, and bytes of memory, that the sizes were chosen for.
    """

    def __init__(
        self, settings: OffloadConfig, sizes: Sizes, device: torch.device, rates: DiskRates, host: int
    ) -> None:
        self.settings, self.sizes, self.device, self.rates, self.host = settings, sizes, device, rates, host
        self.pinned = device.type == "cuda"
        self.disk = Disk(sizes.block, sizes.threads) if settings.on_disk else None
        self._far: Far | None = None

    @property
    def near(self) -> torch.device:
        """Where the share of optimizer state is that is not offloaded."""
        return torch.device("cpu") if self.settings.optimizer == "nvme" else self.device

    def row(self, fragments: list[tuple[str, int, int]]) -> Row:
        """Slots and chunks for a rank's fragments: (name, group, elements)."""
        share = 0.0 if self.settings.optimizer == "none" else self.settings.optimizer_share
        return Row(fragments, self.sizes.chunk, share)

    def states(self, row: Row) -> States:
        """Master weights and moments.

        Raises:
            ConfigError: there is no room on the disk.
        """
        if self.settings.optimizer == "nvme" and row.far:
            assert self.disk
            gradients = self.sizes.gradients_on_disk
            sections = len(KINDS) + gradients
            buffers = Buffers(self.sizes.buffers, sections * row.largest * BYTES, self.pinned)
            self._far = Far(self.file(sections * row.far * BYTES), self.disk, buffers, gradients)
        return States(row, self.near, self._far, self.pinned)

    def gradients(self, row: Row, counted: Callable[[str], bool]) -> Gradients:
        """Gradients that lie beside these states. Call `states` first."""
        return Gradients(row, self.near, self._far, counted, self.pinned)

    def file(self, size: int) -> ScratchFile:
        """A file of this rank alone.

        Raises:
            ConfigError: it cannot be made.
        """
        folder = self.settings.folder
        try:
            return ScratchFile(folder, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                free = shutil.disk_usage(folder).free
                reason = f"a rank needs a file of {size / 2**30:.3g} GiB there, and {free / 2**30:.3g} GiB are free"
                raise ConfigError("sharding.offload.path", str(folder), reason, "name a larger disk") from None
            reason = f"no file can be made there ({error.strerror})"
            raise ConfigError("sharding.offload.path", str(folder), reason, "name a folder on a disk") from None

    def close(self) -> None:
        """End the disk's threads."""
        if self.disk:
            self.disk.close()
