"""Overwrites with NaN what a patch keeps between forwards, so that stale contents cannot pass for fresh ones."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .device import fill_nan

_DEPTH = 6
_SMALLEST = 64
"""Fewer elements than this are constants, not a workspace."""


def poison(module: types.ModuleType, objects: Iterable[tuple[object, set[str]]], spared: set[int]) -> int:
    """Fills every floating tensor that the patched module holds, and every one in an attribute that stock objects lack.

    `objects` are (object, attributes that its stock twin has); `spared` are the storages of pools and inputs. Returns
    how many tensors were filled.
    """
    seen: set[int] = set()
    found: list[torch.Tensor] = []
    for value in vars(module).values():
        found.extend(_tensors(value, module.__name__, seen, _DEPTH))
    for item, stock in objects:
        for name, value in list(vars(item).items()):
            if name not in stock:
                found.extend(_tensors(value, module.__name__, seen, _DEPTH))
    filled = 0
    for tensor in found:
        if (
            tensor.untyped_storage().data_ptr() not in spared
            and tensor.is_floating_point()
            and tensor.numel() >= _SMALLEST
        ):
            fill_nan(tensor)
            filled += 1
    return filled


def _tensors(value: Any, module: str, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    if depth == 0 or id(value) in seen or isinstance(value, (str, bytes, int, float, types.ModuleType)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for child in _children(value, module):
        yield from _tensors(child, module, seen, depth - 1)


def _children(value: Any, module: str) -> list[Any]:
    if isinstance(value, (Mapping, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        return [*vars(value).values(), *(value.__defaults__ or ()), *cells]
    owner = value if isinstance(value, type) else type(value)
    if getattr(owner, "__module__", None) == module:
        slots = [getattr(value, s, None) for s in getattr(owner, "__slots__", ()) if isinstance(s, str)]
        return [*getattr(value, "__dict__", {}).values(), *slots]
    return []


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
