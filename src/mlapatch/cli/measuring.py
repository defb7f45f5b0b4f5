"""The verbs that measure: estimate, trace, profile, bench, runs, compare and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlapatch.cli import run as run_verb
from mlapatch.cli.options import AsJson

Panel = "Measure"

Db = Annotated[
    Path | None,
    typer.Option(
        "--db", envvar="MLAPATCH_DB", metavar="FILE", help="Where runs are kept (default: the user's data folder)."
    ),
]
Label = Annotated[str, typer.Option("--label", metavar="NAME", help="A name for this run, for compare and report.")]


def _estimate(
    preset: Annotated[str | None, typer.Option("--preset", metavar="NAME", help="glm-5, deepseek-v3, ...")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="CONFIG", help="A config.json, or the folder that holds one.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Slots of the KV pool: max_total_num_tokens.")] = 495_552,
    page_size: Annotated[
        int | None, typer.Option("--page-size", help="The server's page size; default 64 for a DSA model, else 1.")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallelism.")] = 8,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="rtx-pro-6000, h200, h100, b200, ...")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option("--bandwidth", metavar="TB/S", help="Memory bandwidth.")] = None,
    memory: Annotated[float | None, typer.Option("--memory", metavar="GB", help="GPU memory.")] = None,
    context: Annotated[int, typer.Option("--context", help="Live tokens of one request.")] = 8192,
    batch: Annotated[int, typer.Option("--batch", help="Requests decoded together.")] = 1,
    measured_tpot: Annotated[
        float | None, typer.Option("--measured-tpot", metavar="MS", help="Stock's TPOT, to predict each patch's.")
    ] = None,
    measured_cast: Annotated[
        float | None, typer.Option("--measured-cast", metavar="MS", help="The cast's time a step, from `trace`.")
    ] = None,
    mem_fraction: Annotated[float, typer.Option("--mem-fraction", help="--mem-fraction-static of the server.")] = 0.9,
    weights: Annotated[float | None, typer.Option("--weights", metavar="GB", help="Weights of one rank.")] = None,
    as_json: AsJson = False,
) -> None:
    """What the whole-pool cast and each patch cost on paper.

    Example: mlapatch estimate --preset glm-5 --tokens 495552 --tp 8 --gpu rtx-pro-6000 --measured-tpot 95.6
    """
    from mlapatch.commands.estimate import estimate

    run_verb(
        lambda: estimate(
            preset=preset,
            model=model,
            tokens=tokens,
            page_size=page_size,
            tp=tp,
            gpu=gpu,
            bandwidth=bandwidth,
            memory=memory,
            context=context,
            batch=batch,
            measured_tpot=measured_tpot,
            measured_cast=measured_cast,
            mem_fraction=mem_fraction,
            weights=weights,
        ),
        as_json=as_json,
    )


def _trace(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Traces (*.trace.json.gz), one a rank, or their folder."),
    ],
    layers: Annotated[int | None, typer.Option("--layers", help="MLA layers, where the steps cannot be told.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Decode steps that were profiled.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="Slots of the pool, to check the cast's size.")] = None,
    top: Annotated[int, typer.Option("--top", help="Kernels to list.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Where a decode step's time goes, and the KV-pool cast in it.

    Example: mlapatch trace /tmp/1785501977.97-TP-*.trace.json.gz
    """
    from mlapatch.commands.trace import trace

    run_verb(lambda: trace(files=files, layers=layers, steps=steps, tokens=tokens, top=top), as_json=as_json)


def _runs(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Show one: its number, label, or last~1.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="bench, profile, trace, launch or verify.")] = None,
    limit: Annotated[int, typer.Option("--limit", help="How many to list.")] = 30,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write all as JSON lines; - for stdout.")
    ] = None,
    take_in: Annotated[
        Path | None, typer.Option("--import", metavar="FILE", help="Add runs that were exported elsewhere.")
    ] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """The experiments that were kept.

    Example: mlapatch runs --kind bench
    """
    from mlapatch.commands.runs import runs

    run_verb(
        lambda: runs(run=run, kind=kind, limit=limit, export=export, take_in=take_in, db=db),
        as_json=as_json and str(export) != "-",
    )


def _compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The run before: its number, label, last or last~1.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The run after.")] = "last",
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """What differs between two runs, and what changed, noise considered.

    Example: mlapatch compare stock patched
    """
    from mlapatch.commands.compare import compare

    run_verb(lambda: compare(a=a, b=b, db=db), as_json=as_json)


def register(app: typer.Typer) -> None:
    """Add the measuring verbs to the application."""
    app.command("estimate", rich_help_panel=Panel)(_estimate)
    app.command("trace", rich_help_panel=Panel)(_trace)
    app.command("runs", rich_help_panel=Panel)(_runs)
    app.command("compare", rich_help_panel=Panel)(_compare)
