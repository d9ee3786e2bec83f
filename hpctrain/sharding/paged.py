"""Optimizer state in memory that a GPU and its host share: a page is where it was last used, and a GPU that is full
gives pages up instead of failing (CUDA unified memory; the paged optimizers of QLoRA, arXiv 2305.14314 section 3).

On a CPU there is nothing to share, and its kernel pages as it always does.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from hpctrain.errors import ConfigError

ATTACH_GLOBAL = 1
"""CU_MEM_ATTACH_GLOBAL: any stream of any device may use it."""

TYPES = {torch.float32: "<f4", torch.float64: "<f8"}
"""Of master weights, as arrays name them."""


def paged_zeros_like(like: Tensor) -> Tensor:
    """Zeros of a tensor's shape and dtype on its device, in pages that a GPU may give up.

    Raises:
        ConfigError: the driver has no such memory.
    """
    if not like.is_cuda:
        return torch.zeros_like(like)
    with torch.cuda.device(like.device):
        pages = Pages(like.numel(), like.dtype)
        return torch.as_tensor(pages, device=like.device).view(like.shape).zero_()


class Pages:
    """A stretch of managed memory as an array of one dim; freed with the last tensor that uses it.

    Args:
        numel: elements.
        dtype: of them.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._driver, self._address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
        size = ctypes.c_size_t(max(1, numel * dtype.itemsize))
        failed = self._driver.cuMemAllocManaged(ctypes.byref(self._address), size, ctypes.c_uint(ATTACH_GLOBAL))
        if failed:
            self._address.value = 0
            reason = f"the driver gives no {size.value} bytes of managed memory (error {failed})"
            raise ConfigError("optimizer.paged", True, reason, "use false")
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (numel,),
            "typestr": TYPES[dtype],
            "data": (self._address.value, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address.value:
            self._driver.cuMemFree_v2(self._address)
