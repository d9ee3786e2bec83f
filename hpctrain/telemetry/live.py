"""Bytes of the tensors that are alive, exactly: what the resident set says depends on the allocator."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this holds, every storage that an operation returns is counted until it is freed.

    What only wraps other tensors does not count: a DTensor's own storage is as large as the whole, and never there.
    Storages that change their size, as FSDP2 lets weights go, count with the size they have.

    Attributes:
        peak: most bytes that were alive at once.
        peaks: the same by phase, as far as `phase` names them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.peaks: dict[str, int] = {}
        self._phase = ""
        self._alive = 0
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._resize: Any = None

    def __enter__(self) -> LiveBytes:
        resize = self._resize = torch.UntypedStorage.resize_
        counted = self._count

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            counted(storage, new=False)
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta" and not is_traceable_wrapper_subclass(leaf):
                self._count(leaf.untyped_storage())
        return out

    def now(self) -> int:
        """Bytes alive."""
        return self._alive

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is alive in here counts to this phase."""
        before, self._phase = self._phase, name
        self._seen()
        try:
            yield
        finally:
            self._phase = before

    def _count(self, storage: torch.UntypedStorage, new: bool = True) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None and not new:
            return
        ref = known[0] if known is not None else weakref.ref(storage, lambda _: self._gone(key))
        self._sizes[key] = (ref, size)
        self._alive += size - (known[1] if known is not None else 0)
        self._seen()

    def _gone(self, key: int) -> None:
        self._alive -= self._sizes.pop(key, (None, 0))[1]

    def _seen(self) -> None:
        self.peak = max(self.peak, self._alive)
        if self._phase:
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._alive)
