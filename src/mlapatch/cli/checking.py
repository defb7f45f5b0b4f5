"""The verb `check`: do the patches still fit?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlapatch.cli import run
from mlapatch.cli.options import AsJson, Gpu, PatchesDirs, PythonExe, SglangPath, Sm, patch_names
from mlapatch.outcome import Outcome

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME...]",
        help="Patches that must fit (default: those applied in the installed SGLang).",
        autocompletion=patch_names,
    ),
]
Releases = Annotated[
    list[str] | None,
    typer.Option("--release", metavar="X", help="A release, a specifier such as '>=0.5.9', or 'latest'. Repeatable."),
]
AllReleases = Annotated[
    bool, typer.Option("--all-releases", help="Every release on the index that one of the patches is meant for.")
]
Wheels = Annotated[list[Path] | None, typer.Option("--wheel", metavar="FILE", help="A wheel file. Repeatable.")]
Refs = Annotated[
    list[str] | None,
    typer.Option("--ref", metavar="REF", help="A commit, branch or tag of the checkout that --sglang names."),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the app."""
    app.command()(check)


def check(
    names: Names = None,
    release: Releases = None,
    all_releases: AllReleases = False,
    pre: Annotated[bool, typer.Option("--pre", help="Pre-releases too.")] = False,
    wheel: Wheels = None,
    ref: Refs = None,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    gpu: Gpu = None,
    sm: Sm = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run the patched code as well, once for each distinct content (needs torch)."),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    json: AsJson = False,
) -> None:
    """Do the patches still fit? The installed SGLang, or releases that are not installed, for CI before an upgrade.

    Example: mlapatch check active-cast --release latest
    """
    from mlapatch.cli.drawn import Drawn
    from mlapatch.commands.check import check as verb

    if json and markdown:
        raise typer.BadParameter("--json and --markdown exclude each other")

    def drawn() -> Outcome:
        with Drawn() as watch:
            return verb(
                names or (),
                releases=release or (),
                all_releases=all_releases,
                pre=pre,
                wheels=wheel or (),
                refs=ref or (),
                sglang=sglang,
                python=python,
                patches=patches,
                gpu=gpu,
                sm=sm,
                verify=verify,
                as_markdown=markdown,
                watch=watch,
            )

    run(drawn, as_json=json)
