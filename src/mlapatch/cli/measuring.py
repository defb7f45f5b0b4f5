"""The verbs that measure: estimate, trace, profile, bench, runs, compare and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlapatch.cli import run as run_verb
from mlapatch.cli.options import AsJson, Db, Keep, Label, PythonExe, SglangPath

Panel = "Measure"

Top = Annotated[int, typer.Option("--top", help="Kernels to list.")]


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
    top: Top = 12,
    label: Label = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep it as a run, for compare and report.")] = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Where a decode step's time goes, and the KV-pool cast in it.

    Example: mlapatch trace /tmp/1785501977.97-TP-*.trace.json.gz
    """
    from mlapatch.commands.trace import trace

    run_verb(
        lambda: trace(files=files, layers=layers, steps=steps, tokens=tokens, top=top, label=label, keep=keep, db=db),
        as_json=as_json,
        keeps=True,
    )


def _bench(
    url: Annotated[str, typer.Option("--url", help="The server.")] = "http://127.0.0.1:30000",
    api: Annotated[str, typer.Option("--api", help="auto, sglang (/generate) or openai (/v1/completions).")] = "auto",
    key: Annotated[str | None, typer.Option("--api-key", envvar="MLAPATCH_API_KEY", help="Sent as a bearer.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model's name, where the server has several.")
    ] = None,
    inputs: Annotated[
        list[int] | None,
        typer.Option("--input", "-i", metavar="TOKENS", help="Prompt length (512); repeatable."),
    ] = None,
    output: Annotated[int, typer.Option("--output", "-o", metavar="TOKENS", help="Answer length.")] = 128,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", "-c", metavar="N", help="Streams at once (1); repeatable."),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", "-r", help="Measured repeats of each case.")] = 3,
    requests: Annotated[int | None, typer.Option("--requests", help="Requests a repeat; default: -c.")] = None,
    shared_prefix: Annotated[int, typer.Option("--shared-prefix", metavar="TOKENS", help="Common beginning.")] = 0,
    warmup: Annotated[int, typer.Option("--warmup", help="Unmeasured repeats, with 8 output tokens.")] = 1,
    flush_cache: Annotated[bool, typer.Option("--flush-cache", help="Empty the radix cache before a case.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Send words, for endpoints that take no token ids.")] = False,
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Token ids are below this.")] = 31_000,
    seed: Annotated[
        int, typer.Option("--seed", help="The same prompts each time, which then hit the radix cache; 0: new ones.")
    ] = 0,
    label: Label = "",
    keep: Keep = True,
    db: Db = None,
    sglang: SglangPath = None,
    python: PythonExe = None,
    as_json: AsJson = False,
) -> None:
    """TPOT, TTFT, ITL and tok/s of a running server.

    Example: mlapatch bench --url http://127.0.0.1:30000 -i 512 -i 8192 -c 1 -c 16 --label stock
    """
    from mlapatch.commands.bench import bench

    run_verb(
        lambda: bench(
            url=url,
            api=api,
            key=key,
            model=model,
            inputs=inputs or [512],
            output=output,
            concurrency=concurrency or [1],
            repeats=repeats,
            requests=requests,
            shared_prefix=shared_prefix,
            warmup=warmup,
            flush_cache=flush_cache,
            text=text,
            vocabulary=vocabulary,
            seed=seed,
            label=label,
            keep=keep,
            db=db,
            sglang=sglang,
            python=python,
        ),
        as_json=as_json,
        keeps=True,
    )


def _profile(
    url: Annotated[str, typer.Option("--url", help="The server, an SGLang.")] = "http://127.0.0.1:30000",
    key: Annotated[str | None, typer.Option("--api-key", envvar="MLAPATCH_API_KEY", help="Sent as a bearer.")] = None,
    steps: Annotated[int, typer.Option("--steps", help="Decode steps to record.")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="Record host activity too; it slows eager servers.")] = False,
    input_tokens: Annotated[int, typer.Option("--input", "-i", metavar="TOKENS", help="Prompt length.")] = 512,
    output: Annotated[int, typer.Option("--output", "-o", metavar="TOKENS", help="Answer length.")] = 256,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", metavar="N", help="Streams at once.")] = 1,
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Token ids are below this.")] = 31_000,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", metavar="DIR", help="For the traces, on the server's file system.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for all ranks to write.")] = 600,
    top: Top = 12,
    label: Label = "",
    keep: Keep = True,
    db: Db = None,
    sglang: SglangPath = None,
    python: PythonExe = None,
    as_json: AsJson = False,
) -> None:
    """Profile a few decode steps of a running server, and read the traces.

    Example: mlapatch profile --url http://127.0.0.1:30000 --label stock
    """
    from mlapatch.commands.profile import profile

    run_verb(
        lambda: profile(
            url=url,
            key=key,
            steps=steps,
            activities=("CPU", "GPU") if cpu else ("GPU",),
            input_tokens=input_tokens,
            output=output,
            concurrency=concurrency,
            vocabulary=vocabulary,
            output_dir=output_dir,
            timeout=timeout,
            top=top,
            label=label,
            keep=keep,
            db=db,
            sglang=sglang,
            python=python,
        ),
        as_json=as_json,
        keeps=True,
    )


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
    delete: Annotated[
        list[str] | None, typer.Option("--delete", metavar="N", help="Delete a run by its number. Repeatable.")
    ] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """The experiments that were kept.

    Example: mlapatch runs --kind bench
    """
    from mlapatch.commands.runs import runs

    run_verb(
        lambda: runs(run=run, kind=kind, limit=limit, export=export, take_in=take_in, delete=delete or (), db=db),
        as_json=as_json and str(export) != "-",
        keeps=True,
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


def _report(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...]", help="Runs, the one before first (default: each label's).")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="Its heading.")] = "",
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Kept runs as one HTML page, before against after, to send to a colleague.

    Example: mlapatch report stock patched -o report.html
    """
    from mlapatch.commands.report import report

    run_verb(lambda: report(runs=runs or (), output=output, title=title, db=db), as_json=as_json, keeps=True)


def register(app: typer.Typer) -> None:
    """Add the measuring verbs to the application."""
    app.command("estimate", rich_help_panel=Panel)(_estimate)
    app.command("trace", rich_help_panel=Panel)(_trace)
    app.command("profile", rich_help_panel=Panel)(_profile)
    app.command("bench", rich_help_panel=Panel)(_bench)
    app.command("runs", rich_help_panel=Panel)(_runs)
    app.command("compare", rich_help_panel=Panel)(_compare)
    app.command("report", rich_help_panel=Panel)(_report)
