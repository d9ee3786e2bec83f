"""How much memory and disk offloading takes, and in which pieces it moves. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.config.schema import RunConfig
from hpctrain.layout.activations import COMPUTE_BYTES
from hpctrain.layout.slots import UNIT
from hpctrain.layout.units import GIB, MIB

RECORD, GRADIENT = 16, 4
"""Bytes of an element while it is updated (master weight, two moments, gradient), and of its gradient."""

BUFFERS = 4
"""Chunks that are on their way or in use at once: one updated, one written, two read ahead."""


@dataclass(frozen=True)
class DiskRates:
    """What a disk does, as `hpctrain bench nvme` measures it.

    Attributes:
        read, write: bytes/s of all threads of one rank.
        block: bytes that a thread moves at once.
        threads: at the same time.
    """

    read: float
    write: float
    block: int = 4 * MIB
    threads: int = 4


@dataclass(frozen=True)
class Sizes:
    """In which pieces a rank's offloaded state moves.

    Attributes:
        chunk: elements that are read, updated and written together; a multiple of `UNIT`.
        buffers: chunks that are in memory at once.
        block: bytes that a thread moves at once.
        threads: that move them.
        ahead: bytes of weights that are read before they are asked for.
        gradients_on_disk: gradients lie on the disk beside the state; otherwise in memory of the host.
    """

    chunk: int
    buffers: int
    block: int
    threads: int
    ahead: int
    gradients_on_disk: bool


USUAL = DiskRates(2e9, 2e9)
"""What is supposed of a disk that nobody has measured yet."""


def sizes_for(config: RunConfig, held: Sequence[int], disk: DiskRates, host: int) -> Sizes:
    """Pieces for a rank.

    A chunk is large enough that all threads of the disk are busy with it, and small enough that there are some in
    the state and that buffers take an eighth of the host's memory at most.

    Args:
        config: of the run.
        held: elements of each parameter that the rank keeps.
        disk: as measured.
        host: bytes of memory that the rank may use there.
    """
    settings, elements = config.sharding.offload, sum(held)
    chunk = min(
        max(disk.block * disk.threads // RECORD, 64 * UNIT),
        max(elements // 8, UNIT),
        max(host // 8 // (BUFFERS * RECORD), UNIT),
    )
    far = settings.optimizer == "nvme" and config.sharding.stage == 3
    gradients = GRADIENT * settings.optimizer_share * elements
    on_disk = far and (settings.gradients == "nvme" or (settings.gradients == "auto" and gradients > host / 4))
    ahead = min(host // 8, 4 * max(held, default=0) * COMPUTE_BYTES[config.train.precision])
    return Sizes(-(-chunk // UNIT) * UNIT, BUFFERS, disk.block, disk.threads, ahead, on_disk)


@dataclass(frozen=True)
class Elsewhere:
    """State of a rank by where it is, bytes.

    Attributes:
        weights, gradients, optimizer: what stays on the device.
        host: memory of the host, buffers included.
        pinned: of that, what is locked there where the device is a GPU.
        disk: files on the node's disk.
        read, written: of the disk in a step.
        moved: between host and device in a step, where the device is a GPU.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    pinned: int = 0
    disk: int = 0
    read: int = 0
    written: int = 0
    moved: int = 0


def elsewhere(
    config: RunConfig,
    held: Sequence[int],
    weights: int,
    gradients: int,
    optimizer: int,
    micro_batches: int = 1,
    disk: DiskRates = USUAL,
    host: int = 1 << 62,
    again: float = 0.0,
) -> Elsewhere:
    """Where a rank's state is, and what of it moves in a step.

    Args:
        config: of the run.
        held: elements of each parameter that the rank keeps.
        weights, gradients, optimizer: bytes of all of them, wherever they are.
        micro_batches: of a step.
        disk: as measured.
        host: bytes of memory that the rank may use there.
        again: share of its layers whose forward runs again, with weights that are read again.
    """
    settings, sharded = config.sharding.offload, config.sharding.stage == 3
    if not settings.state:
        return Elsewhere(weights, gradients, optimizer)
    sizes, lp = sizes_for(config, held, disk, host), COMPUTE_BYTES[config.train.precision]
    padded = sum(-(-n // UNIT) * UNIT for n in held)
    share = settings.optimizer_share if settings.optimizer != "none" else 0.0
    far, near = round(share * padded), padded - round(share * padded)
    state, of_gradients = RECORD - GRADIENT, GRADIENT * sharded
    on_disk = settings.optimizer == "nvme"
    stays = (state * near, of_gradients * near) if not on_disk else (0, 0)
    waiting = of_gradients * far * (not sizes.gradients_on_disk) + (state + of_gradients) * near * on_disk
    resident = waiting + state * far * (settings.optimizer == "cpu")
    record = (RECORD if sizes.gradients_on_disk else state) * sizes.chunk
    buffers = sizes.buffers * record * on_disk + BUFFERS * GRADIENT * sizes.chunk * sizes.gradients_on_disk
    files = (state + GRADIENT * sizes.gradients_on_disk) * far * on_disk
    read, written = state * far * on_disk, state * far * on_disk
    if sizes.gradients_on_disk:
        read, written = read + GRADIENT * far * micro_batches, written + GRADIENT * far * micro_batches
    moved = (0 if sharded and settings.params != "none" else lp * far) + of_gradients * far * (2 * micro_batches - 1)
    if settings.params != "none":
        on_drive = round(settings.params_share * lp * padded) if settings.params == "nvme" else 0
        passes = (2 + again) * micro_batches
        resident += lp * padded - on_drive
        buffers += (sizes.ahead + BUFFERS * lp * sizes.chunk + lp * 2 * max(held, default=0)) * (on_drive > 0)
        files += on_drive
        read, written = read + round(passes * on_drive), written + on_drive
        moved += round(passes * lp * padded)
    return Elsewhere(
        0 if settings.params != "none" else weights,
        stays[1] if sharded else gradients,
        stays[0],
        resident + buffers,
        resident + buffers,
        files,
        read,
        written,
        moved,
    )


PCIE = 25e9
"""Bytes/s each way that page-locked copies reach over PCIe 4 x16, of the 32 GB/s that the link has."""


def in_words(away: Elsewhere, ranks: int, disk: DiskRates, gpu: bool) -> str:
    """What a node needs and what a step costs.

    Args:
        away: of the rank that has most away.
        ranks: on the node.
        disk: as measured.
        gpu: the ranks compute on GPUs, and what they read and write goes over PCIe.
    """
    pinned = f" ({ranks * away.pinned / GIB:.3g} GiB of it page-locked)" if gpu else ""
    text = f"a node keeps {ranks * away.host / GIB:.3g} GiB in host memory{pinned}"
    if away.disk:
        seconds = ranks * (away.read / disk.read + away.written / disk.write)
        text += (
            f" and {ranks * away.disk / GIB:.3g} GiB on its disk; a step reads {ranks * away.read / 1e9:.3g} GB there "
            f"and writes {ranks * away.written / 1e9:.3g} GB, {seconds:.3g} s at {disk.read / 1e9:.3g} and "
            f"{disk.write / 1e9:.3g} GB/s"
        )
    return text + (f"; {away.moved / 1e9:.3g} GB a GPU over PCIe, {away.moved / PCIE:.3g} s" if gpu else "")
