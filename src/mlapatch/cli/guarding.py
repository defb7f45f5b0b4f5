"""The verbs `guard record` and `guard check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlapatch.cli import run
from mlapatch.cli.options import AsJson, PatchesDirs, PythonExe, SglangPath

BaselineFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="PATH", help="The baseline (default: mlapatch-guard.toml, see docs/guard.md)."),
]


def register(app: typer.Typer) -> None:
    """Add the verbs to the app."""
    verbs = typer.Typer(
        no_args_is_help=True, help="Keep a baseline of your own edits to SGLang, and prove them untouched."
    )
    verbs.command()(record)
    verbs.command()(check)
    app.add_typer(verbs, name="guard")


def record(
    file: BaselineFile = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where edits of the last baseline are gone or changed.")
    ] = False,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    json: AsJson = False,
) -> None:
    """Write down every local edit of this SGLang, without mlapatch's own.

    Example: mlapatch guard record && git add mlapatch-guard.toml
    """
    from mlapatch.commands.guard import record as verb

    run(
        lambda: verb(file=file, replace=replace, sglang=sglang, python=python, patches=patches),
        as_json=json,
        keeps=True,
    )


def check(
    file: BaselineFile = None,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    json: AsJson = False,
) -> None:
    """Compare this SGLang's local edits with the baseline: gone, changed, new or committed is exit 4.

    Example: mlapatch guard check
    """
    from mlapatch.commands.guard import check as verb

    run(lambda: verb(file=file, sglang=sglang, python=python, patches=patches), as_json=json)
