"""The verbs around a running server: diagnose, launch, stop, logs, backends, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mlapatch.cli import run
from mlapatch.cli.options import (
    AsJson,
    Db,
    Gpu,
    Keep,
    Label,
    PatchesDirs,
    PythonExe,
    SglangPath,
    Sm,
    patch_names,
    run_names,
)

LogsDir = Annotated[Path, typer.Option("--logs", metavar="DIR", help="Where logs and run records are kept.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the app."""
    app.command()(diagnose)
    app.command()(launch)
    app.command()(stop)
    app.command()(logs)
    app.command()(backends)
    app.command()(doctor)


def diagnose(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A server's output; - reads standard input.")],
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="Exit 1 unless every rank of the log's node says that it runs the patched bytes installed here.",
        ),
    ] = False,
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    json: AsJson = False,
) -> None:
    """Say why a server log ended as it did: cause, phase, rank, evidence, advice; an unknown failure is called unknown.

    Example: mlapatch diagnose logs/gather-cast-20261129-112636.log
    """
    from mlapatch.commands.diagnose import diagnose as verb

    run(lambda: verb(log=log, ranks=ranks, sglang=sglang, python=python, patches=patches), as_json=json)


def launch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT] [-- ARGS...]",
            help="A start script (default scripts/run_tp8_cds16.sh) and, after --, arguments for it.",
        ),
    ] = None,
    command: Annotated[
        bool, typer.Option("--command", help="What follows -- is a command of your own, to be started instead.")
    ] = False,
    name: Annotated[str, typer.Option(help="Names the log and the run (default: the applied patches).")] = "",
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the server is ready, and leave it running.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the whole preflight and start nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start although a check fails (exit 5 only; never past --require).")
    ] = False,
    patience: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PHASE=SECONDS", help="Seconds without a new line in a phase, e.g. weights=900. Repeatable."
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            metavar="NAME",
            help="Refuse unless this patch is applied. Repeatable.",
            autocompletion=patch_names,
        ),
    ] = None,
    logs: LogsDir = Path("logs"),
    sglang: SglangPath = None,
    python: PythonExe = None,
    patches: PatchesDirs = None,
    label: Label = "",
    keep: Keep = True,
    db: Db = None,
    json: AsJson = False,
) -> None:
    """Check, start, follow and diagnose a server; one prompt must make sense before it counts as ready.

    Example: mlapatch launch --name active-cast -- --max-total-tokens 495552

    Example: mlapatch launch --detach --command -- python -m sglang.launch_server --model-path M --port 30000
    """
    from mlapatch.commands.launch import launch as verb
    from mlapatch.guard import preflight
    from mlapatch.serve.patience import read

    script, arguments = split_words(words or [], sys.argv, command)
    run(
        lambda: verb(
            script=script,
            arguments=arguments,
            command=arguments if command else None,
            name=name,
            logs=logs,
            detach=detach,
            dry_run=dry_run,
            force=force,
            patience=read(patience or []),
            require=require or (),
            sglang=sglang,
            python=python,
            patches=patches,
            tell=_tell,
            guard=preflight,
            label=label,
            keep=keep,
            db=db,
        ),
        as_json=json,
        keeps=True,
    )


def split_words(words: list[str], argv: list[str], command: bool) -> tuple[Path | None, list[str]]:
    """The script before `--` and the arguments after it; click itself does not say where `--` stood."""
    after = len(argv) - argv.index("--") - 1 if "--" in argv else 0
    script, arguments = words[: len(words) - after], words[len(words) - after :]
    if len(script) > 1 or (command and script):
        raise typer.BadParameter(f"put -- before what is meant for the server: -- {' '.join(script[not command :])}")
    return (Path(script[0]) if script else None), arguments


def stop(
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="A run's name or pid (default: the only one).", autocompletion=run_names),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Stop every server that was started from here.")] = False,
    grace: Annotated[float, typer.Option(metavar="SECONDS", help="Time between SIGTERM and SIGKILL.")] = 10.0,
    logs: LogsDir = Path("logs"),
    json: AsJson = False,
) -> None:
    """End a detached server with its whole process tree.

    Example: mlapatch stop active-cast
    """
    from mlapatch.commands.stop import stop as verb

    run(lambda: verb(name=name, logs=logs, every=every, grace=grace), as_json=json, keeps=True)


def logs(
    name: Annotated[
        str,
        typer.Argument(metavar="[NAME]", help="A run's name or pid (default: the newest).", autocompletion=run_names),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the server ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many lines of what is already there.")] = 40,
    listing: Annotated[bool, typer.Option("--list", help="List the runs that were started from here.")] = False,
    folder: LogsDir = Path("logs"),
    json: AsJson = False,
) -> None:
    """Show or follow the log of a server that launch started.

    Example: mlapatch logs -f
    """
    from mlapatch.commands.logs import logs as verb

    quiet = json and not listing
    run(
        lambda: verb(
            name=name, folder=folder, follow=follow, lines=lines, listing=listing, out=_tell if quiet else _show
        ),
        as_json=json,
    )


def backends(
    preset: Annotated[
        str | None,
        typer.Option(help="A model by name: glm-5 (default), deepseek-v3, deepseek-r1, deepseek-v3.2, kimi-k2."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="PATH", help="A config.json, or the folder that holds it.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallel size.")] = 8,
    gpu: Gpu = None,
    sm: Sm = None,
    release: Annotated[
        str | None, typer.Option("--release", metavar="X", help="An SGLang release instead of the installed one.")
    ] = None,
    flashinfer: Annotated[
        str | None, typer.Option("--flashinfer", metavar="X", help="A flashinfer version instead of the one beside it.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option("--kv-cache-dtype", help="As SGLang's option.")] = "fp8_e4m3",
    sglang: SglangPath = None,
    python: PythonExe = None,
    json: AsJson = False,
) -> None:
    """Show which attention backends can run a model on a GPU, why not, and whether a patch is needed at all.

    Example: mlapatch backends --preset glm-5 --gpu rtx-pro-6000 --release 0.5.9
    """
    from mlapatch.commands.backends import backends as verb

    run(
        lambda: verb(
            preset=preset,
            model=model,
            tp=tp,
            gpu=gpu,
            sm=sm,
            release=release,
            flashinfer=flashinfer,
            kv_cache_dtype=kv_cache_dtype,
            sglang=sglang,
            python=python,
        ),
        as_json=json,
    )


def doctor(sglang: SglangPath = None, python: PythonExe = None, json: AsJson = False) -> None:
    """Show what matters about this environment, on one page: SGLang, libraries, GPUs, tools, settings.

    Example: mlapatch doctor --python /opt/venv/bin/python
    """
    from mlapatch.commands.doctor import doctor as verb

    run(lambda: verb(sglang=sglang, python=python), as_json=json)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(text: str) -> None:
    print(text, flush=True)
