"""What goes wrong around a verb: a wrong command line is an error like any other, and Ctrl-C always one line."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

import typer
from typer.core import TyperGroup

from mlapatch.exits import Exit

if TYPE_CHECKING:
    from mlapatch.errors import MlapatchError

#: Click's own, wherever this release of typer keeps it: BadParameter is a UsageError is a ClickException.
_ClickException: Any = typer.BadParameter.__mro__[2]


class Verbs(TyperGroup):
    """The root command."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """As click's, with errors printed as those of the verbs are."""
        words = sys.argv[1:] if args is None else list(args)
        try:
            _refuse_empty(words)
            code = super().main(words, standalone_mode=False, **extra)
        except _ClickException as error:
            if not standalone_mode:
                raise
            code = _refused(error, words)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else int(Exit.OK))
        return code

    def make_context(self, *words: Any, **extra: Any) -> Any:
        """Reading the command line."""
        try:
            return super().make_context(*words, **extra)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None

    def invoke(self, ctx: Any) -> Any:
        """Reading the verb's own part of it, importing the verb."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None


def interrupted(*, keeps: bool = False) -> int:
    """Say that Ctrl-C came and what is left of the work; the exit code. `keeps`: the verb may have kept something."""
    journal = sys.modules.get("mlapatch.install.journal")
    wrote = keeps or bool(getattr(journal, "WRITTEN", ()))
    what = "what was finished is kept" if wrote else "nothing was written"
    print(f"{chr(10) if sys.stderr.isatty() else ''}interrupted; {what}", file=sys.stderr)
    return int(Exit.INTERRUPTED)


def discard(stream: TextIO) -> None:
    """Send what is left in the stream, and what comes, to nowhere: it cannot be written, not at the end either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def tell(error: MlapatchError, *, as_json: bool) -> None:
    """Print an error. Where nobody reads it or the disk is full, the exit code has to say it: it stays the error's."""
    from mlapatch.cli.render import emit_error

    for stream in (sys.stdout, sys.stderr) if as_json else (sys.stderr,):  # JSON on a full disk: as text after all
        try:
            emit_error(error, as_json=stream is sys.stdout)
            stream.flush()
        except BrokenPipeError:
            return discard(stream)
        except OSError:
            discard(stream)
        else:
            return None
    return None


def _refuse_empty(words: Sequence[str]) -> None:
    """`--sglang "$UNSET"` would be the working folder: typer makes a path of what is empty."""
    words = list(itertools.takewhile(lambda word: word != "--", words))
    for name in ("--sglang", "--python", "--patches"):
        if f"{name}=" in words or (name, "") in itertools.pairwise(words):
            raise typer.BadParameter(f"{name} is empty (a variable that is not set?)")


def _refused(error: Any, words: Sequence[str]) -> int:
    """Print what is wrong with a command line; the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help, and no error
        error.show()
        return int(error.exit_code)
    before = itertools.takewhile(lambda word: word != "--", words)
    tell(_as_error(error, words), as_json="--json" in before)
    return int(error.exit_code)


def _as_error(error: Any, words: Sequence[str]) -> MlapatchError:
    from mlapatch.errors import MlapatchError

    ctx = getattr(error, "ctx", None)
    what = " ".join(str(error.format_message()).split())
    what = what if what.endswith("...") else what.removesuffix(".")
    what = what.removeprefix("Invalid value for ").removeprefix("Invalid value: ")
    typed = " ".join(["mlapatch", *itertools.takewhile(lambda word: not word.startswith("-"), words)])
    missing = type(error).__name__ == "MissingParameter"
    return MlapatchError(
        Exit.USAGE,
        what[:1].lower() + what[1:] if what[1:2].islower() else what,
        expected=" ".join(ctx.get_usage().split()).removeprefix("Usage: ") if ctx else "",
        found="none" if missing else str(getattr(error, "option_name", "") or ""),
        next=f"{ctx.command_path if ctx else typed} --help",
    )
