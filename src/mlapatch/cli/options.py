"""Options shared by several verbs, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def patch_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the shell's completion: folders' names, so that no patch is read and no parser imported."""
    from mlapatch.catalogue import bundled_folder

    folders = [bundled_folder("patches"), *map(Path, ctx.params.get("patches") or ())]
    files = [file for folder in folders for file in (*folder.glob("*/patch.toml"), *folder.glob("patch.toml"))]
    names = {file.parent.name for file in files} - set(ctx.params.get("names") or ())
    return sorted(name for name in names if name.startswith(incomplete))


def patches_or_auto(ctx: typer.Context, incomplete: str) -> list[str]:
    """The same for `apply`."""
    return [*patch_names(ctx, incomplete), *(["auto"] if "auto".startswith(incomplete) else [])]


def gpu_names(incomplete: str) -> list[str]:
    """For `--gpu`."""
    from mlapatch.measure.gpus import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


def known_capability(sm: int | None) -> int | None:
    """For `--sm`: a GPU that does not exist would be refused by no patch but those that need another one."""
    from mlapatch.measure.gpus import CAPABILITIES, is_capability

    if sm is not None and not is_capability(sm):
        known = ", ".join(map(str, CAPABILITIES))
        raise typer.BadParameter(
            f"{sm} is no compute capability; expected {known} or a newer one (90 for 9.0, 120 for 12.0). "
            "nvidia-smi --query-gpu=name,compute_cap --format=csv shows it; or name the card with --gpu"
        )
    return sm


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """For `stop` and `logs`: the records in the folder of logs; the newest names first."""
    from mlapatch.serve.run_record import load_all

    folder = Path(ctx.params.get("logs") or ctx.params.get("folder") or "logs")
    names = dict.fromkeys(record.name for record in load_all(folder))
    return [name for name in names if name.startswith(incomplete)]


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
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="Stand in for a GPU that is not here, e.g. h200, rtx-pro-6000.",
        autocompletion=gpu_names,
    ),
]
Sm = Annotated[
    int | None,
    typer.Option(
        "--sm",
        metavar="NN",
        help="Stand in for a GPU by compute capability, e.g. 90, 120.",
        callback=known_capability,
    ),
]
Db = Annotated[
    Path | None,
    typer.Option(
        "--db", envvar="MLAPATCH_DB", metavar="FILE", help="Where runs are kept (default: the user's data folder)."
    ),
]
Keep = Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the run for compare and report.")]
Label = Annotated[str, typer.Option("--label", metavar="NAME", help="A name for this run, for compare and report.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Force = Annotated[
    bool, typer.Option("--force", help="Go on although the version, GPU or flashinfer is unsupported (exit 5 only).")
]
