"""Commands that are printed for the user to type carry the options that named the SGLang they are about."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from mlapatch.errors import MlapatchError
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text

#: Verbs that take the options; a command that names an SGLang already stays as it is.
_COMMAND = re.compile(
    r"\bmlapatch (?:apply|revert|status|diff|verify|launch|guard record|guard check)\b(?!\.| --(?:sglang|python))"
)
_CARRIED = ("--sglang", "--python", "--patches")


def options(argv: Sequence[str] | None = None) -> str:
    """What of `--sglang`, `--python` and `--patches` stands on this command line, to be typed again."""
    given: list[str] = []
    words = iter(sys.argv[1:] if argv is None else argv)
    for word in words:
        if word == "--":  # what follows is the server's
            break
        name, equals, value = word.partition("=")
        if name in _CARRIED:
            given += [name, shlex.quote(value if equals else next(words, ""))]
    return "".join(f" {word}" for word in given)


def addressed(outcome: Outcome) -> Outcome:
    """The outcome with the options in every command that it names."""
    carried = options()
    if not carried:
        return outcome
    return replace(
        outcome, data=_in_table(outcome.data, carried), blocks=[_in_block(block, carried) for block in outcome.blocks]
    )


def addressed_error(error: MlapatchError) -> MlapatchError:
    """The error with the options in its next command."""
    carried = options()
    if carried and error.next:
        error.next = _in_text(error.next, carried)
    return error


def _in_text(text: str, carried: str) -> str:
    return _COMMAND.sub(lambda match: match[0] + carried, text)


def _in_block(block: Block, carried: str) -> Block:
    if isinstance(block, Text):
        return replace(block, lines=[_in_text(line, carried) for line in block.lines])
    if isinstance(block, Pairs):
        return replace(block, rows=[(key, _in_text(value, carried)) for key, value in block.rows])
    if isinstance(block, Table):
        return replace(block, rows=[[_in_text(cell, carried) for cell in row] for row in block.rows])
    return block


def _in_table(table: dict[str, object], carried: str) -> dict[str, object]:
    """Only what stands under a key `next`."""
    return {
        key: _in_text(item, carried) if key == "next" and isinstance(item, str) else _in_data(item, carried)
        for key, item in table.items()
    }


def _in_data(value: object, carried: str) -> object:
    if isinstance(value, dict):
        return _in_table(value, carried)
    return [_in_data(item, carried) for item in value] if isinstance(value, list) else value
