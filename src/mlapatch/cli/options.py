"""Options shared by several verbs, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TargetGroup = "Which SGLang"

SglangPath = Annotated[
    Path | None,
    typer.Option(
        "--sglang",
        envvar="MLAPATCH_SGLANG",
        metavar="PATH",
        help="The sglang package folder, its site-packages, or a checkout.",
        rich_help_panel=TargetGroup,
    ),
]
PythonExe = Annotated[
    str | None,
    typer.Option(
        "--python",
        metavar="EXE",
        help="Use the SGLang that this interpreter would import (default: the running one).",
        rich_help_panel=TargetGroup,
    ),
]
PatchesDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--patches",
        metavar="DIR",
        help="A folder of patches to add; a patch in it replaces a bundled one of the same name. Repeatable.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Stand in for a GPU that is not here, e.g. h200, rtx-pro-6000."),
]
Sm = Annotated[
    int | None, typer.Option("--sm", metavar="NN", help="Stand in for a GPU by compute capability, e.g. 90, 120.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Force = Annotated[
    bool, typer.Option("--force", help="Go on although the version, GPU or flashinfer is unsupported (exit 5 only).")
]
