"""The command line: options once, outcomes to exit codes. Verbs live in `mlapatch.commands` and are imported lazily."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mlapatch import __version__
from mlapatch.cli.group import Verbs, discard, interrupted, tell
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome

#: In a pipe nothing is drawn in boxes or cut to a width: neither help nor what is wrong with a command line.
_TERMINAL = sys.stdout.isatty() and sys.stderr.isatty()
_CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="mlapatch",
    cls=Verbs,
    help="Named, reversible, verified source patches for an installed SGLang's flashinfer MLA backend.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if _TERMINAL else None,
    context_settings=_CONTEXT if _TERMINAL else {**_CONTEXT, "terminal_width": 10_000},
    epilog="Exit codes: " + " · ".join(f"{int(code)} {code.sentence}" for code in Exit),
)


def run(verb: Callable[[], Outcome], *, as_json: bool = False, keeps: bool = False) -> None:
    """Run one verb, print its outcome, and exit with its code. `keeps`: what it finished is kept, should it not end."""
    try:
        code = _run(verb, as_json)
    except KeyboardInterrupt:
        code = interrupted(keeps=keeps)
    raise typer.Exit(code)


def _run(verb: Callable[[], Outcome], as_json: bool) -> int:
    from mlapatch.cli.address import addressed, addressed_error
    from mlapatch.cli.render import emit

    try:
        outcome = addressed(verb())
    except MlapatchError as error:
        tell(addressed_error(error), as_json=as_json)
        return int(error.exit)
    try:
        emit(outcome, as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:  # `mlapatch status | head -1`: what was asked is done, whoever reads has enough
        discard(sys.stdout)
    except OSError as error:  # `mlapatch status --json > FILE` on a full disk
        discard(sys.stdout)
        print(f"error: what was asked is done, but the output cannot be written: {error.strerror}", file=sys.stderr)
        return int(Exit.ENVIRONMENT)
    return int(outcome.exit)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlapatch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Named, reversible, verified source patches for an installed SGLang's flashinfer MLA backend."""


#: Verbs that end at once: looking for garbage among the nodes of a parsed file would be a fifth of their time.
SHORT = {"list", "status", "apply", "revert", "diff"}


def _register(verb: str = "") -> None:
    """Add the verbs to the app: only `verb` where there is one of that name, since typer prepares each at the start."""
    from mlapatch.cli import checking, guarding, measuring, patching, serving

    for room in (patching, checking, guarding, serving, measuring):
        room.register(app)
    named = [c for c in app.registered_commands if verb in (c.name, getattr(c.callback, "__name__", ""))]
    app.registered_commands = named if verb and named else app.registered_commands


def _report_bug(error: BaseException) -> int:
    """Write the traceback to a log and print one line that names it."""
    import tempfile
    import traceback

    from mlapatch.cli.render import visible

    text = f"mlapatch {__version__}\nargv: {sys.argv}\n" + "".join(traceback.format_exception(error))
    try:
        handle, name = tempfile.mkstemp(prefix="mlapatch-bug-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text)
    except OSError as trouble:
        name = f"could not be written ({trouble})"
    what = visible(f"{type(error).__name__}: {str(error)[:500]}")
    print(f"error: a bug in mlapatch ({what}); nothing more was written. Log: {name}", file=sys.stderr)
    return int(Exit.BUG)


def main() -> None:
    """Entry point: never a bare traceback."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):  # paths need not be UTF-8, nor terminals
            sys.stdout.reconfigure(errors="backslashreplace")
        verb = sys.argv[1] if len(sys.argv) > 1 else ""
        if verb in SHORT:
            gc.disable()
        _register(verb)
        app(prog_name="mlapatch")  # also for `python -m mlapatch`: completion goes by this name
    except KeyboardInterrupt:
        sys.exit(interrupted())
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(int(Exit.OK))
    except Exception as error:
        wrapped = isinstance(error.__cause__, KeyboardInterrupt)  # by Python to 3.11, where a class is being made
        sys.exit(interrupted() if wrapped else _report_bug(error))
