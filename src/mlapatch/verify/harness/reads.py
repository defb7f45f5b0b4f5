"""Which slots of the KV pool the interpreted Triton kernels loaded from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class PoolReads:
    """Collects the slots that masked-in loads touch in one pool tensor, `[slots, 1, width]`."""

    active: PoolReads | None = None

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._ranges = [(b.data_ptr(), b.numel() * b.element_size(), b.stride(0) * b.element_size()) for b in buffers]
        self.slots: set[int] = set()

    def note(self, pointers: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> None:
        """One load: addresses, and which of them are read."""
        address = pointers[mask] if mask.shape == pointers.shape else pointers.ravel()
        for base, size, row in self._ranges:
            offset = address.astype(np.int64) - base
            inside = offset[(offset >= 0) & (offset < size)]
            if inside.size:
                self.slots.update(int(slot) for slot in np.unique(inside // row))

    def take(self) -> set[int]:
        """The slots since the last time."""
        slots, self.slots = self.slots, set()
        return slots


def trace_interpreter() -> None:
    """Reports each load of the interpreter to the active collector.

    Also lets masks be what they are on a GPU: Triton 3.9 gives a scalar condition that is spread over a block the type
    int32, and then refuses it as a mask.
    """
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        if PoolReads.active is not None:
            PoolReads.active.note(ptrs.data, mask.data)
        return masked_load(self, ptrs, mask, *rest)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return masked_store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = load, store
