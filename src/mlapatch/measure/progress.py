"""A progress bar on a terminal's stderr, and nothing elsewhere."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def bar(title: str, total: float, *, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Yield a function that advances the bar; `unit="bytes"` shows sizes and speed."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda _amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda amount: progress.update(task, advance=amount)
