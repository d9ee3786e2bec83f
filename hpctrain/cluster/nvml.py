"""What NVIDIA's library knows of the GPUs of this machine, through pynvml where it is installed."""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import replace
from typing import Any

from hpctrain.cluster import pci
from hpctrain.cluster.cpus import MOST
from hpctrain.cluster.node import Cpus, Distance, Gpu, Node
from hpctrain.cluster.source import refusal

LINKS = 18
"""NVLinks that a GPU has at most (NVML_NVLINK_MAX_LINKS)."""
CLUSTER_BYTES = 16
"""Of the UUID of a cluster (NVML_GPU_FABRIC_UUID_LEN)."""


def read() -> Node:
    """The GPUs that NVML shows.

    Raises:
        ConfigError: there is no pynvml, no driver or no GPU.
    """
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped]
    except ImportError:
        raise refusal(
            "NVML", "Python's pynvml is not installed", "pip install nvidia-ml-py, or use nvidia-smi"
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise refusal("NVML", f"it cannot be used ({error})") from None
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        raise refusal("NVML", f"it gave up ({error})") from None
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any) -> Node:
    gpus: dict[str, Gpu] = {}
    links: dict[str, list[str]] = {}
    problems: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        where = pci.address(_string(nvml.nvmlDeviceGetPciInfo(handle).busId))
        gpus[where] = Gpu(
            index,
            name=_string(nvml.nvmlDeviceGetName(handle)),
            pci=where,
            uuid=_string(nvml.nvmlDeviceGetUUID(handle)),
            cpus=_cpus(nvml, handle),
            mig=_mig(nvml, handle),
            clique=_clique(nvml, handle),
        )
        links[where] = _links(nvml, handle)
    ordered = pci.numbered(gpus)
    if [gpu.pci for gpu in ordered] != list(gpus):
        problems.append("NVML does not list GPUs in the order of their addresses")
    nvlinks = _pairs(ordered, links)
    return Node(
        gpus=tuple(replace(gpu, index=i) for i, gpu in enumerate(ordered)),
        nvlinks=nvlinks,
        distances={pair: Distance.NVLINK for pair, count in nvlinks.items() if count},
        sources=("NVML",),
        problems=tuple(problems),
    )


def _string(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _cpus(nvml: Any, handle: Any) -> Cpus:
    try:
        words = nvml.nvmlDeviceGetCpuAffinity(handle, MOST // 64)
    except nvml.NVMLError:
        return ()
    return tuple(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def _mig(nvml: Any, handle: Any) -> bool | None:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # GPUs that know no MIG


def _clique(nvml: Any, handle: Any) -> str | None:
    """The NVLink domain of several nodes that a GPU is in; "" for none, None where the driver knows no such things.

    As NCCL reads it (src/mnnvl.cc): a cluster whose UUID is all zeros is none.
    """
    try:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        info.version = info.version or nvml.nvmlGpuFabricInfo_v2
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        place = type(info).clusterUuid
        cluster = bytes(info)[place.offset : place.offset + CLUSTER_BYTES]
        done = info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == nvml.NVML_SUCCESS
    except (nvml.NVMLError, AttributeError):
        return None
    return f"{uuid.UUID(bytes=cluster)}/{info.cliqueId}" if done and any(cluster) else ""


def _links(nvml: Any, handle: Any) -> list[str]:
    """Addresses at the other end of the links that are up."""
    ends = []
    for link in range(LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                ends.append(pci.address(_string(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))
        except nvml.NVMLError:
            break
    return ends


def _pairs(gpus: tuple[Gpu, ...], links: dict[str, list[str]]) -> dict[tuple[str, str], int]:
    """Links of each pair; ends that are no GPU are switches, over which a pair has as many as the poorer of the two."""
    if not any(links.values()):
        return {}
    known = {gpu.pci for gpu in gpus}
    switched = {where: sum(1 for end in ends if end not in known) for where, ends in links.items()}
    return {
        (a.key, b.key): links[a.pci].count(b.pci) + min(switched[a.pci], switched[b.pci])
        for i, a in enumerate(gpus)
        for b in gpus[i + 1 :]
    }
