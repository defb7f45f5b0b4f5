"""Outcomes and errors as text or JSON. Terminals get tables and colour; pipes get lines that are never cut."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlapatch.outcome import Block, Diff, Outcome, Pairs, Table, Text, Warn

if TYPE_CHECKING:
    from mlapatch.errors import MlapatchError


def _rich_wanted() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with what could steer a terminal or turn its direction as escapes: patches and logs are by strangers."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _json(data: object) -> str:
    encoding = (getattr(sys.stdout, "encoding", "") or "").lower()
    text = json.dumps(data, indent=2, ensure_ascii=not encoding.startswith("utf"), default=str)
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)  # only inside strings, and none is left below 32


def emit(outcome: Outcome, *, as_json: bool) -> None:
    """Print one outcome: JSON to stdout, or its blocks (warnings to stderr either way)."""
    for block in outcome.blocks:
        if isinstance(block, Warn):
            print(f"warning: {visible(block.text)}", file=sys.stderr)
    if as_json:
        print(_json(outcome.data))
        return
    shown = [b for b in outcome.blocks if not isinstance(b, Warn)]
    if _rich_wanted():
        _emit_rich(shown)
    else:
        _emit_plain(shown)


def _emit_plain(blocks: Iterable[Block]) -> None:
    for block in blocks:
        if isinstance(block, Text):
            print(visible("\n".join(block.lines)))
        elif isinstance(block, Pairs):
            print(visible("\n".join(f"{key}: {value}" for key, value in block.rows)))
        elif isinstance(block, Table):
            for row in block.rows:
                print(visible("  ".join(f"{column}: {cell}" for column, cell in zip(block.columns, row, strict=True))))
        elif isinstance(block, Diff):
            text = visible(block.text.replace("\r\n", "\n")) if sys.stdout.isatty() else block.text  # a file: as it is
            print(text, end="" if text.endswith("\n") else "\n")


def _emit_rich(blocks: Iterable[Block]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.syntax import Syntax
    from rich.table import Table as RichTable

    console = Console(emoji=False)  # rich honours NO_COLOR itself
    for block in blocks:
        if isinstance(block, Text):
            for line in block.lines:
                console.print(escape(visible(line)), style=block.style or None, highlight=False, soft_wrap=True)
        elif isinstance(block, Pairs):
            width = max((len(key) for key, _ in block.rows), default=0)
            for key, value in block.rows:
                console.print(
                    f"[bold]{escape(key.ljust(width))}[/]  {escape(visible(value))}", highlight=False, soft_wrap=True
                )
        elif isinstance(block, Table):
            table = RichTable(title=block.title or None, title_justify="left", header_style="bold")
            for column in block.columns:
                table.add_column(column, overflow="fold")
            for row in block.rows:
                table.add_row(*(escape(visible(cell)) for cell in row))
            console.print(table)
        elif isinstance(block, Diff):
            text = visible(block.text.replace("\r\n", "\n"))
            console.print(Syntax(text, "diff", background_color="default", word_wrap=False))


def emit_error(error: MlapatchError, *, as_json: bool) -> None:
    """Print one error: what, where, expected and found, next command."""
    if as_json:
        print(_json(error.as_dict()))
        return
    print(f"error: {visible(error.what)}", file=sys.stderr)
    for name in ("where", "expected", "found"):
        value = getattr(error, name)
        if value:
            print(f"  {name}: {visible(value)}", file=sys.stderr)
    if error.detail:
        print(visible(error.detail.rstrip("\n")), file=sys.stderr)
    if error.next:
        print(f"  next: {visible(error.next)}", file=sys.stderr)
