"""JSON that somebody else wrote: whatever is wrong with it is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard


def parsed(text: str | bytes) -> Any:
    """What the text says; ValueError where it is no JSON, or nested more deeply than Python's parser goes."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parsed_object(text: str | bytes) -> dict[str, Any]:
    """The same for an object; ValueError where it is a list, text or number."""
    found = parsed(text)
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is needed, found {type(found).__name__}")
    return found


def size_in(table: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number above 0 that a model's config can mean, or the default for whatever else stands there."""
    found = table.get(key)
    return found if is_size(found) else default


def is_size(value: object) -> TypeGuard[int]:
    """Layers, heads, dimensions: whole, above 0, and not more than any model has."""
    return type(value) is int and 0 < value < 1 << 24
