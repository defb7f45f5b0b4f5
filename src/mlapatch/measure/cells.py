"""What stands in a cell of the file of runs, as text and as JSON; nothing that is found there makes reading fail."""

from __future__ import annotations

import json
from typing import Any

import orjson

from mlapatch.jsontext import parsed_object


def written(value: dict[str, Any]) -> str:
    """A set-up or result as JSON, whatever is in it."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # an argument that is no UTF-8, a number beyond 64 bits
        return json.dumps(value, default=str, ensure_ascii=False).encode("utf-8", "replace").decode()


def text(cell: object) -> str:
    """What SQLite lets stand in a column of text, whatever it was declared."""
    return cell.decode("utf-8", "backslashreplace") if isinstance(cell, bytes) else str(cell)


def object_in(cell: object) -> dict[str, Any]:
    """A run's set-up or result; where it is damaged, a result that says so: other runs can be read all the same."""
    try:
        return parsed_object(text(cell))
    except ValueError as error:
        return {"error": f"this part of the run is damaged: {error}"}
