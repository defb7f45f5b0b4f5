"""Verbs that read and change an installed SGLang: list, status, apply, revert, diff, demo."""

from __future__ import annotations

from typing import Annotated

import typer

from mlapatch.cli import run
from mlapatch.cli.options import (
    AsJson,
    Db,
    Force,
    Gpu,
    Keep,
    Label,
    PatchesDirs,
    PythonExe,
    SglangPath,
    Sm,
    patch_names,
    patches_or_auto,
)
from mlapatch.outcome import Outcome

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...", help="Patches by name, see 'mlapatch list'; or auto.", autocompletion=patches_or_auto
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the diff and write nothing.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the app."""
    app.command("list")(list_)
    app.command()(status)
    app.command()(apply)
    app.command()(revert)
    app.command()(diff)
    app.command()(verify)
    app.command()(demo)


def list_(patches: PatchesDirs = None, json: AsJson = False) -> None:
    """List the catalogue.

    Example: mlapatch list --json
    """
    from mlapatch.commands.listing import list_patches

    run(lambda: list_patches(patches=patches), as_json=json)


def status(
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require", metavar="NAME", help="Exit 1 unless it is applied. Repeatable.", autocompletion=patch_names
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME...]", help="More names for --require.", autocompletion=patch_names),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="DIGEST|FILE",
            help="Exit 1 with the difference unless the digest is this one, or that of a file with another node's "
            "status --json (- reads standard input).",
        ),
    ] = None,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    gpu: Gpu = None,
    sm: Sm = None,
    json: AsJson = False,
) -> None:
    """Show which SGLang, pristine or not, a verdict per patch, and a digest to compare nodes.

    Example: mlapatch status --require active-cast && python -m sglang.launch_server ...
    """
    from mlapatch.commands.status import status as verb

    if also and not require:
        raise typer.BadParameter("names are for --require: mlapatch status --require NAME...")
    names = [*(require or ()), *(also or ())]
    run(
        lambda: verb(sglang=sglang, python=python, patches=patches, gpu=gpu, sm=sm, require=names, expect=expect),
        as_json=json,
    )


def apply(
    names: Names,
    dry_run: DryRun = False,
    force: Force = False,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    gpu: Gpu = None,
    sm: Sm = None,
    json: AsJson = False,
) -> None:
    """Apply patches, all or nothing. 'auto' picks the best one that fits and says why.

    Example: mlapatch apply active-cast
    """
    from mlapatch.commands.apply import apply as verb

    run(
        lambda: verb(
            names, sglang=sglang, python=python, patches=patches, gpu=gpu, sm=sm, dry_run=dry_run, force=force
        ),
        as_json=json,
    )


def revert(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]", help="Default: everything that mlapatch applied.", autocompletion=patch_names
        ),
    ] = None,
    dry_run: DryRun = False,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    json: AsJson = False,
) -> None:
    """Take patches out again and keep every other edit of the file.

    Example: mlapatch revert
    """
    from mlapatch.commands.revert import revert as verb

    run(lambda: verb(names, sglang=sglang, python=python, patches=patches, dry_run=dry_run), as_json=json)


def diff(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A patch by name, see 'mlapatch list'.", autocompletion=patch_names)
    ],
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    json: AsJson = False,
) -> None:
    """Show what a patch changes in this SGLang.

    Example: mlapatch diff gather-cast --sglang /opt/venv/lib/python3.12/site-packages
    """
    from mlapatch.commands.diff import diff as verb

    run(lambda: verb(name, sglang=sglang, python=python, patches=patches), as_json=json)


def demo(
    release: Annotated[str, typer.Option("--release", metavar="X", help="The SGLang release to show it on.")] = "0.5.9",
) -> None:
    """Show the whole story on a real SGLang wheel in a temporary folder; no GPU needed.

    Example: mlapatch demo --release 0.5.23
    """
    from mlapatch.commands.demo import demo as verb

    run(lambda: verb(release=release))


def verify(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="Patches by name.", autocompletion=patch_names)
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="Where to run both.")] = "cpu",
    installed: Annotated[bool, typer.Option("--installed", help="Judge the bytes on disk instead.")] = False,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", metavar="NAME", help="Only this scenario. Repeatable.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For each patch.")] = 600.0,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    label: Label = "",
    keep: Keep = True,
    db: Db = None,
    json: AsJson = False,
) -> None:
    """Run stock and patched code side by side and compare what they compute. This executes both.

    Example: mlapatch verify active-cast --device cpu
    """
    from typing import cast

    from mlapatch.cli.drawn import Drawn
    from mlapatch.commands.verify import Device
    from mlapatch.commands.verify import verify as verb

    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device is cpu or cuda, not {device}")

    def drawn() -> Outcome:
        with Drawn() as watch:
            return verb(
                names or (),
                device=cast("Device", device),
                installed=installed,
                scenarios=scenario or (),
                timeout_s=timeout,
                sglang=sglang,
                python=python,
                patches=patches,
                label=label,
                keep=keep,
                db=db,
                watch=watch,
            )

    run(drawn, as_json=json, keeps=keep)
